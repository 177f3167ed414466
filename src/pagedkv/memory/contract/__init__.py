"""The contract: the words that go into the memory system and come out of it, and that its rooms have in common.

In the order in which they are met::

    spec, space_config   what goes in: groups of layers, and all that a space needs to know
    keys                 what a prompt's blocks are named by
    arguments            what callers bring, checked at the door; field_checks: the same of specifications' fields
    budget               how memory is split among pools
    plan, plan_buffer    StepPlan, and the words of its buffer; fingerprint: by which a device knows its space's plans
    answers, events, explanation   what comes out
    errors               the tree of errors; extras: packages that may be missing
    arrays               types of arrays

Each of these modules is for everyone, so each is a door of its own. None decides anything.
"""
