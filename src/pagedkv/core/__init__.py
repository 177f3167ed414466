"""The bookkeeping floor: block pools, prefix index, tables and digests, as arrays and compiled loops.

Reading order: ``blocks`` (what is known of a block), ``free_queue``, ``prefix_index``, ``pool``,
then ``rows`` and ``rules`` (what is known of a sequence in a group), ``tables`` (growing, shrinking,
sliding, forking), ``digests`` and ``extra_keys`` (identity), ``publishing`` and ``matching`` (how
content becomes findable and is found), ``swapping``.
"""
