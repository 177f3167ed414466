"""The contract: the types and errors that the rooms of the memory system share, with its inputs and its answers.

In the order in which data passes them::

    spec, space_config   inputs: groups of layers, and the configuration of a space
    keys                 the extra keys in the digests of a prompt's blocks
    arguments            checks of callers' arguments; field_checks: checks of the fields of specifications
    budget               splits memory among pools
    plan, plan_buffer    StepPlan, and the layout of its buffer; fingerprint: ties a plan to its configuration
    answers, events, explanation   outputs
    errors               the tree of errors; extras: packages that may not be installed
    arrays               types of arrays

Any room may import any of these modules. None of them holds state or makes a decision.
"""
