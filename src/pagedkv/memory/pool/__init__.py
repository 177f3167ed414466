"""The floor of one pool: its blocks, the queue of free ones, eviction, and names. It knows no sequences.

Reading order: ``blocks`` (what is known of a block); ``block_record``, ``links``, ``contents`` and ``keeping``, which
write some of that and decide nothing; ``free_queue``, ``moments`` and ``eviction`` (in which order content goes);
``prefix_index`` (names); ``life_cycle`` (when a block is taken, shared, released, evicted); ``block_pool`` (a pool as
an object); ``holding`` (readers outside); and what a name is made of: ``sha_instructions``, ``sha256``, ``digests``,
``extra_keys`` and ``block_keys``.
"""
