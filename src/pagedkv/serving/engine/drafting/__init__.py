"""A draft model: a smaller decoder that proposes the tokens which a step of the target model verifies.

The *target* is the model that answers. The layers of the draft model are further groups of the same block space, so one
plan and one block table step serve both models, and hits, forks, preemptions and copies on write move both caches
together::

    groups      | full   window  | draft:full |       one space, one storage, one plan a step
    target      writes and reads the first ones
    draft model                  the last ones

    step   schedule   k draft slots behind the token of each row that decodes; their ids are not known
           draft      the draft model computes what the plan computes, and then the drafts one by one
           target     computes the plan, drafts among it
           sample     a token behind each draft; the scheduler accepts the drafts that equal them

Modules: ``pairing`` checks that two models fit and joins their groups, ``passes`` has the tokens that go through the
draft model together, ``drafter`` runs these passes and draws the drafts. None of them decides on an answer: a draft is
accepted only where the target samples the same token (:mod:`~pagedkv.serving.engine.draft_acceptance`).
"""

from pagedkv.serving.engine.drafting.drafter import Drafter
from pagedkv.serving.engine.drafting.pairing import DEFAULT_DRAFT_TOKENS, DraftModel, paired, require_fit

__all__ = ["DEFAULT_DRAFT_TOKENS", "DraftModel", "Drafter", "paired", "require_fit"]
