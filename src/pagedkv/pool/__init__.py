"""The floor of one pool: its blocks, the queue of free ones, eviction, and names. It knows no sequences.

Reading order: ``blocks`` (what is known of a block), ``free_queue``, ``eviction`` (in which order content goes),
``prefix_index`` (names), ``block_pool`` (a block's journey), ``holding`` (readers outside); and what a name is made of:
``sha_instructions``, ``sha256``, ``digests``, ``extra_keys`` and ``block_keys``.
"""
