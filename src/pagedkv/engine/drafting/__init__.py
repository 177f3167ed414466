"""A draft model: a smaller decoder that proposes tokens, which a step of the target model verifies.

The *target* is the model that the answers come from. The layers of the draft model are further groups of the same block
space. So one plan and one update of the block tables serve both models, and hits, forks, preemptions and copies on
write apply to both caches together::

    groups      | full   window  | draft:full |       one space, one storage, one plan a step
    target      writes and reads the first ones
    draft model                  the last ones

    step   schedule   k draft slots after the token of each row that decodes; their ids are not known yet
           draft      the draft model computes the tokens of the plan, then the drafts one by one
           target     computes the plan, drafts included
           sample     a token for each draft's position, and one more; the scheduler accepts the drafts that equal them

Modules: ``pairing`` checks that two models fit and joins their groups; ``passes`` lists the tokens of each pass of the
draft model; ``pass_buffers`` holds the metadata that captured passes read; ``drafter`` runs the passes and draws the
drafts. Drafts do not change answers: a draft is accepted only if the target samples the same token
(:mod:`~pagedkv.engine.draft_acceptance`).
"""

from pagedkv.engine.drafting.drafter import Drafter
from pagedkv.engine.drafting.pairing import DEFAULT_DRAFT_TOKENS, DraftModel, paired, require_fit

__all__ = ["DEFAULT_DRAFT_TOKENS", "DraftModel", "Drafter", "paired", "require_fit"]
