"""The contract: the types and errors that the rooms of the memory system share, with its inputs and its answers.

In the order in which data passes them::

    spec, space_config   inputs: groups of layers; the configuration of a space, and how memory is split among its pools
    keys                 the extra keys in the digests of a prompt's blocks
    arguments            checks of callers' arguments
    plan                 StepPlan
    answers              outputs: results, receipts, explanations, events
    head_slices          which slice of which block goes where, between engines with other numbers of ranks
    arrays               types of arrays
    extras               packages that may not be installed

Any room may import any of these modules. None of them holds state or makes a decision.
"""
