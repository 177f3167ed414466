"""vLLM's own suites of its KV-cache core on our `BlockSpace`: which cases fail, and why.

They run as they are in a process of their own, with a plug-in in which `KVCacheManager` is an adapter on a space
(:mod:`.vllm_core_adapter`): the scheduler's suites, those of prefix caching, and those of connectors that run a
scheduler. A case counts if rows of a space were allocated or grown for it; others say nothing about a space. A case
that fails and is not listed fails here, as does one that is listed and passes.
``python -m tests.peers.test_vllm_core FOLDER [--theirs] [FILE ...]``, with vLLM's source distribution, prints the
numbers by file and each case that failed, with what it said; with ``--theirs`` those of vLLM's own manager.
"""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from tests.peers.vllm_suites import PEERS, Suite

FILES: Final = (
    "core/prefix_cache/test_hybrid_prefix_cache_hit_rate.py",
    "core/prefix_cache/test_mamba_eagle_resume_checkpoint.py",
    "core/prefix_cache/test_partial_prefix_cache_hits.py",
    "core/test_async_scheduler.py",
    "core/test_contiguous_kv_packing.py",
    "core/test_deferred_block_free.py",
    "core/test_kv_cache_utils.py",
    "core/test_mamba_align_chunk_split.py",
    "core/test_prefix_caching.py",
    "core/test_prefix_replay.py",
    "core/test_priority_preemption_bug.py",
    "core/test_priority_scheduler_random.py",
    "core/test_scheduler.py",
    "core/test_swa_inflight_window_free.py",
    "kv_connector/unit/test_bidirectional_kv_transfer.py",
    "kv_connector/unit/test_cache_pollution_prevention.py",
    "kv_connector/unit/test_decode_bench_connector.py",
    "kv_connector/unit/test_error_propagation.py",
    "kv_connector/unit/test_invalid_blocks_correctness.py",
    "kv_connector/unit/test_kv_load_failure_recovery.py",
    "kv_connector/unit/test_remote_decode_lifecycle.py",
    "kv_connector/unit/test_remote_prefill_lifecycle.py",
    "kv_connector/unit/test_scheduler_kv_connector_override.py",
)
"""Of ``tests/v1``: those that build a `KVCacheManager`, by themselves or in a scheduler."""

ENVIRONMENT: Final = (
    "fails with vLLM's own manager here too: needs torchvision, a model of the hub, or a fixture of its conftest"
)
OWN_PARTS: Final = (
    "looks into the structures of vLLM's manager: queue, map of hashes, managers of single types, classes"
)
HISPARSE: Final = "pages of a running request on the host (HiSparse): a space has no such group"
AHEAD: Final = "names that cover tokens ahead beside states or events, or listed for others: num_ahead is refused there"
CHAINS: Final = (
    "chains of draft layers that compute a prompt's last tokens again (MTP): the adapter does not translate them"
)
STATES_OF_DRAFTS: Final = "states of drafts: the adapter has drafts as lookahead slots, which keep no states"
RINGS: Final = "a ring of one block a request (CircularBufferSpec): a space has no such rule"
REPLAYED: Final = (
    "windows that are replayed for every hit, or keep more than a window: the adapter does not translate them"
)
CROSS: Final = (
    "blocks of an encoder's tokens beside the decoder's (CrossAttentionSpec): the adapter does not translate them"
)
DROPS: Final = (
    "expects that an EAGLE hit drops its last block: here names cover the token ahead, and nothing is dropped"
)
HASHER: Final = "the tokens that names cover ahead are known to the hashes of requests alone, not to the manager"
COPIES: Final = (
    "expects which block keeps a state's name, and when it is copied: here a row goes on in a copy, which the plan has"
)
UNFILLED: Final = (
    "expects a hit inside a block that no sequence has filled: only filled blocks of attention have names here"
)
SAME_STEP: Final = (
    "expects an answer about a state that the open step computes: here it is not hit before that step is planned"
)
EVERY_INTERVAL: Final = "expects states at ends of chunks alone: here one is left at every interval that a chunk passes"
SHED: Final = "expects that what a window or a state leaves behind has no name: here it is hit until its block is taken"
ALONE: Final = "expects that a window sheds without full attention beside it: there a space keeps everything"
EVENTS: Final = "asks events for the number of an adapter, or for a session: ours have the adapter's name"
WORDS: Final = "looks for words of vLLM's, or for a refusal of what has no effect here"
EMPTY: Final = "allocates a request without tokens: an empty prompt is refused here"
BY_REASON: Final[Mapping[str, tuple[str, ...]]] = {
    ENVIRONMENT: (
        "core/prefix_cache/test_hybrid_prefix_cache_hit_rate.py::test_prefix_cache_hit_rate",
        "core/test_priority_scheduler_random.py::test_priority_scheduling_blast",
        "core/test_scheduler.py::test_streaming_lookahead_hashes_follow_recomputed_kv",
        "core/test_scheduler.py::test_schedule_multimodal_requests",
        "core/test_scheduler.py::test_async_scheduling_pp_allows_rescheduling_with_output_placeholders",
        "core/test_scheduler.py::test_schedule_partial_requests",
        "core/test_scheduler.py::test_encoder_only_prompt_longer_than_budget_is_chunked",
        "core/test_scheduler.py::test_same_step_duplicate_encoder_input_stays_cached",
        "core/test_scheduler.py::test_no_mm_input_chunking",
        "core/test_scheduler.py::test_no_mm_input_chunking_for_same_step_duplicate",
        "core/test_scheduler.py::test_no_mm_input_chunking_at_item_boundary",
        "core/test_scheduler.py::test_ec_connector_text_only_request",
        "core/test_scheduler.py::test_ec_connector_cache_hit_external_load",
        "core/test_scheduler.py::test_ec_connector_cache_miss_computes_locally",
        "core/test_scheduler.py::test_ec_connector_with_partial_cache_hit_multi_round",
        "core/test_scheduler.py::test_ec_connector_schedule_multiple_requests",
        "core/test_scheduler.py::test_ec_connector_unable_to_allocate",
        "core/test_scheduler.py::test_priority_scheduling_ec_connector_preemption_and_resumption",
        "core/test_scheduler.py::test_ec_connector_allocate_encoder_tokens_with_external_load",
        "core/test_scheduler.py::test_ec_connector_update_connector_output_called",
        "core/test_scheduler.py::test_eagle3_mm_encoder_cache_with_shift",
        "core/test_scheduler.py::test_free_encoder_inputs_respects_unconfirmed_placeholders",
        "core/test_scheduler.py::test_free_encoder_inputs_notifies_the_ec_connector",
        "core/test_scheduler.py::test_unavailable_encoder_input_fails_the_request_as_retryable",
        "core/test_scheduler.py::test_encoder_cache_accepts_matching_embed_count",
        "core/test_scheduler.py::test_encoder_cache_rejects_mismatched_embed_count",
        "core/test_scheduler.py::test_encoder_cache_embed_count_mismatch_restores_prior_hit_state",
        "core/test_scheduler.py::test_encoder_cache_rejects_mismatched_embed_count_within_request",
        "core/test_scheduler.py::test_free_encoder_inputs_unchanged_without_spec_decode",
        "core/test_scheduler.py::test_waiting_encoder_stall_does_not_starve_later_requests",
        "core/test_scheduler.py::test_waiting_encoder_stall_is_counted_as_deferred",
        "core/test_scheduler.py::test_waiting_encoder_stall_kv_holder_keeps_drain_priority",
        "core/test_scheduler.py::test_encoder_cache_retained_across_preemption_and_resume",
        "core/test_scheduler.py::test_encoder_cache_recomputed_when_evicted_during_preemption",
        "core/test_scheduler.py::test_ec_connector_ensure_cache_available_defers_request",
        "core/test_scheduler.py::test_ec_connector_waits_for_embeddings_in_prefix_replay",
        "core/test_scheduler.py::test_ec_connector_defers_running_request_for_async_reload",
        "core/test_scheduler.py::test_cpu_encoder_input_updates_wait_for_completed_prefill",
        "core/test_scheduler.py::test_cpu_encoder_input_updates_resume_and_abort",
        "core/test_scheduler.py::test_cpu_encoder_input_updates_restore_after_kv_load_failure",
        "core/test_scheduler.py::test_cpu_encoder_input_updates_preserve_shm_handles",
        "kv_connector/unit/test_bidirectional_kv_transfer.py::test_p_node_pull_kv_from_d",
        "kv_connector/unit/test_bidirectional_kv_transfer.py::test_p_node_pull_then_send_kv",
        "kv_connector/unit/test_bidirectional_kv_transfer.py::test_p_node_deferred_pull_on_no_handshake",
        "kv_connector/unit/test_bidirectional_kv_transfer.py::test_turn2_deadline_gate",
        "kv_connector/unit/test_bidirectional_kv_transfer.py::test_turn2_full_prefix_hit_with_expired_deadline_skips_gate",
    ),
    OWN_PARTS: (
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_eagle_group_registers_unaligned_tail_under_partial_hash_hits",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_internal_checkpoint_publication_respects_retention",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_intermediate_chunk_checkpoint_reserved_only_under_dense_retention",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_hash_aligned_query_end_uses_regular_partial_tail",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_hybrid_partial_hash_truncates_full_attention_hit_length",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_resolved_cache_hit_alignment_matches_coordinator",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_partial_hit_resumes_on_replicated_mamba_snapshot",
        "core/test_deferred_block_free.py::test_cow_retentions_deferred_until_copy_step_processed",
        "core/test_prefix_caching.py::test_prefill",
        "core/test_prefix_caching.py::test_prefill_hybrid_model",
        "core/test_prefix_caching.py::test_prefill_plp",
        "core/test_prefix_caching.py::test_evict",
        "core/test_prefix_caching.py::test_kv_cache_events",
        "core/test_prefix_caching.py::test_block_stored_event_group_idx",
        "core/test_prefix_caching.py::test_block_stored_event_group_idx_multiple_groups",
        "core/test_prefix_caching.py::test_block_stored_event_group_idx_out_of_bounds",
        "core/test_prefix_caching.py::test_different_block_size",
        "core/test_prefix_caching.py::test_cache_hit_local_and_external",
        "core/test_prefix_caching.py::test_cache_hit_local_and_external_three_groups",
        "core/test_prefix_caching.py::test_cache_hit_local_and_external_three_groups_preempt_and_reallocate",
        "core/test_prefix_caching.py::test_cache_hit_local_and_external_two_groups_preempt_and_reallocate",
        "core/test_prefix_caching.py::test_pure_swa_retention_interval_caches_sparse_tails",
        "core/test_scheduler.py::test_hybrid_per_group_hit_divergence_with_connector",
        "core/test_scheduler.py::test_hybrid_divergent_hit_fallback_is_capped_at_retained_auxiliary_outputs[kept]",
        "core/test_scheduler.py::test_hybrid_fa_deeper_hit_respects_connector_lookup_policy",
        "kv_connector/unit/test_cache_pollution_prevention.py::test_invalid_blocks_evicted_prevents_cache_pollution",
    ),
    HISPARSE: (
        "core/test_prefix_caching.py::test_hisparse_does_not_write_back_reprefillable_tokens",
        "core/test_prefix_caching.py::test_hisparse_builds_dma_row_mirrors_across_pages",
        "core/test_prefix_caching.py::test_hisparse_reports_when_context_is_fully_resident",
        "core/test_prefix_caching.py::test_hisparse_residency_update_sends_only_changed_pages",
        "core/test_prefix_caching.py::test_hisparse_readmitted_request_resends_its_full_residency",
        "core/test_prefix_caching.py::test_hisparse_host_prefix_can_be_completed_by_indexer_offload",
        "core/test_prefix_caching.py::test_hisparse_indexer_offload_is_capped_by_missing_host_prefix",
        "core/test_prefix_caching.py::test_connector_completes_partial_prefix_without_importing_missing_host_kv",
        "core/test_prefix_caching.py::test_nixl_hisparse_full_block_import_keeps_a_writable_tail",
        "core/test_prefix_caching.py::test_hisparse_aborted_tail_restore_retains_both_endpoints",
        "core/test_prefix_caching.py::test_hisparse_keeps_resident_pages_until_hot_buffer_is_allocated",
        "core/test_prefix_caching.py::test_hisparse_full_pool_keeps_pages_pinned_until_preemption",
        "core/test_prefix_caching.py::test_hisparse_materializes_prefix_without_allocating_hot_blocks",
        "core/test_prefix_caching.py::test_hisparse_materialization_respects_per_step_spill_budget",
        "core/test_prefix_caching.py::test_hisparse_deferred_free_retains_host_blocks_until_fence",
        "core/test_prefix_caching.py::test_hisparse_host_cow_copy_is_drained_without_a_gpu_pool",
        "core/test_prefix_caching.py::test_hisparse_inflight_host_import_reserves_remaining_gpu_pages",
        "core/test_prefix_caching.py::test_hisparse_async_admission_requires_full_prompt_host_pages",
        "core/test_prefix_caching.py::test_hisparse_admitted_async_loads_can_finish_with_nothing_running",
        "core/test_prefix_caching.py::test_hisparse_import_capacity_includes_hits_and_cow",
        "core/test_prefix_caching.py::test_hisparse_host_exhaustion_defers_allocation",
        "core/test_prefix_caching.py::test_host_receive_completion_without_spill_metadata",
        "core/test_prefix_caching.py::test_hisparse_recomputation_does_not_complete_failed_host_import",
        "core/test_prefix_caching.py::test_hisparse_host_import_ignores_unsealed_tail",
        "core/test_prefix_caching.py::test_hisparse_resident_request_can_grow_without_hot_capacity",
        "core/test_prefix_caching.py::test_hisparse_capacity_query_does_not_require_hot_blocks",
        "core/test_prefix_caching.py::test_hisparse_events_report_host_and_device_placement",
        "core/test_prefix_caching.py::test_hisparse_prefix_hit_adopts_gpu_shadow_pages",
        "core/test_prefix_caching.py::test_hisparse_prefix_hit_under_pressure_adopts_surviving_copies",
        "core/test_prefix_caching.py::test_hisparse_host_backed_request_accepts_local_prefix_hit",
        "core/test_prefix_caching.py::test_hisparse_finished_request_leaves_free_copies",
        "core/test_prefix_caching.py::test_hisparse_cleanup_publishes_only_finalized_terminal_pages",
        "core/test_prefix_caching.py::test_hisparse_prefill_reads_host_once_it_fills_admission_window",
        "core/test_prefix_caching.py::test_hisparse_preempted_prefill_resumes_from_durable_prefix",
        "core/test_prefix_caching.py::test_hisparse_terminal_prefix_waits_for_all_workers_and_preserves_identity",
        "core/test_prefix_caching.py::test_hisparse_reset_prefix_cache_drops_copies",
        "core/test_prefix_caching.py::test_hisparse_reused_copy_is_not_adopted",
        "core/test_prefix_caching.py::test_hisparse_external_import_uses_hard_gpu_footprint",
        "core/test_prefix_caching.py::test_hisparse_external_import_survives_capacity_retry",
        "core/test_prefix_caching.py::test_can_fit_full_sequence_hisparse_caps_resident_pages",
        "core/test_prefix_caching.py::test_device_eviction_keeps_host_prefix",
        "core/test_scheduler.py::test_pending_hisparse_spill_keeps_scheduler_alive",
        "core/test_scheduler.py::test_pending_hisparse_reclamation_defers_preemption",
    ),
    AHEAD: (
        "core/prefix_cache/test_mamba_eagle_resume_checkpoint.py::test_sibling_resumes_from_the_observed_junction",
        "core/prefix_cache/test_mamba_eagle_resume_checkpoint.py::test_sibling_resumes_below_the_block_grid_when_the_prefix_ends_early",
        "core/prefix_cache/test_mamba_eagle_resume_checkpoint.py::test_mamba_prefix_cache_drops_hash_block",
        "core/prefix_cache/test_mamba_eagle_resume_checkpoint.py::test_scheduler_never_stops_where_the_manager_refuses",
        "core/prefix_cache/test_mamba_eagle_resume_checkpoint.py::test_a_junction_past_the_prompt_falls_back_and_registers_nothing",
        "core/prefix_cache/test_mamba_eagle_resume_checkpoint.py::test_disabled_by_default",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_hybrid_partial_hit_with_eagle_stays_within_group_blocks",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_mamba_partial_tail_hits_below_eagle_proof_boundary",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_mamba_coarse_checkpoint_retained_below_eagle_proof_boundary",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_hybrid_sliding_window_group_disables_partial_hash_hits",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_partial_hit_with_eagle_rewinds_one_hash_unit",
        "core/test_prefix_caching.py::test_prefill_hybrid_model_eagle",
        "core/test_prefix_caching.py::test_kv_events_reconstruct_lookahead_block_hashes",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[64-0-1-1089-1088]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[64-1-1-1089-1088]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[128-0-1-1089-1088]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[128-1-1-1089-1088]",
        "core/test_prefix_caching.py::test_eagle_hybrid_mamba_hits_partial_prompt_boundary",
        "core/test_prefix_caching.py::test_mamba_partial_hit_requires_matching_lookahead_tokens[0-1]",
        "core/test_prefix_caching.py::test_mamba_partial_hit_requires_matching_lookahead_tokens[0-2]",
        "core/test_prefix_caching.py::test_mamba_partial_hit_requires_matching_lookahead_tokens[1-1]",
        "core/test_prefix_caching.py::test_mamba_partial_hit_requires_matching_lookahead_tokens[1-2]",
        "core/test_prefix_caching.py::test_mamba_partial_hit_requires_matching_lookahead_tokens[2-1]",
        "core/test_prefix_caching.py::test_mamba_partial_hit_requires_matching_lookahead_tokens[2-2]",
        "core/test_prefix_caching.py::test_eagle_swa_boundary_caches_post_boundary_block",
        "core/test_prefix_caching.py::test_eagle_grouped_swa_siblings_use_same_cache_mask",
        "core/test_prefix_caching.py::test_hybrid_local_kv_retention_mtp_reuses_latest_boundary",
    ),
    CHAINS: (
        "core/prefix_cache/test_mamba_eagle_resume_checkpoint.py::test_enabling_never_reduces_reuse",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[64-0-2-1089-1024]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[64-0-2-1090-1088]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[64-0-3-1089-1024]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[64-0-3-1091-1088]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[64-1-2-1089-1024]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[64-1-2-1090-1088]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[64-1-3-1089-1024]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[64-1-3-1091-1088]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[128-0-2-1089-1024]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[128-0-2-1090-1088]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[128-0-3-1089-1024]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[128-0-3-1091-1088]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[128-1-2-1089-1024]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[128-1-2-1090-1088]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[128-1-3-1089-1024]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[128-1-3-1091-1088]",
    ),
    STATES_OF_DRAFTS: (
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-True-4-2-2-7-0]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-True-8-16-16-512-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-True-8-16-16-513-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-True-8-128-896-127-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-True-8-128-896-128-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-True-8-128-896-129-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-True-8-128-896-7040-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-True-8-128-896-7168-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-True-8-128-896-7296-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-True-8-128-896-7449-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-True-4-2-2-7-0]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-True-8-16-16-512-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-True-8-16-16-513-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-True-8-128-896-127-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-True-8-128-896-128-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-True-8-128-896-129-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-True-8-128-896-7040-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-True-8-128-896-7168-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-True-8-128-896-7296-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-True-8-128-896-7449-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_eagle_block_aligned_checkpoint_replaces_newer_hash",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_checkpoint_reservation_matches_worker",
        "core/test_mamba_align_chunk_split.py::test_fragmented_first_chunk_does_not_poison_mamba_prefix_cache",
        "core/test_mamba_align_chunk_split.py::test_fragmented_tail_chunk_does_not_poison_mamba_prefix_cache",
        "core/test_mamba_align_chunk_split.py::test_lookahead_split_caches_partial_tail_boundary",
        "core/test_mamba_align_chunk_split.py::test_intermediate_chunk_ends_stay_block_aligned",
        "core/test_mamba_align_chunk_split.py::test_poisoning_is_block_size_independent",
        "core/test_prefix_caching.py::test_hybrid_mamba_retention_mtp_resend_of_aligned_prompt",
        "core/test_prefix_caching.py::test_hybrid_mamba_retention_lookahead_keeps_last_prompt_boundary",
        "kv_connector/unit/test_remote_prefill_lifecycle.py::test_async_load_does_not_double_reserve_mamba_spec_blocks",
    ),
    RINGS: (
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_opted_out_scratch_group_keeps_partial_hash_hits",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_kpool_tail_supports_128_token_partial_hash_hits",
        "core/test_contiguous_kv_packing.py::TestCSALinearGrouping::test_scratch_group_survives_computed_block_truncation",
        "core/test_contiguous_kv_packing.py::TestCompressorRingGroup::test_ring_beside_paged_groups_keeps_the_kv_block_as_scheduler_block",
    ),
    REPLAYED: (
        "core/test_contiguous_kv_packing.py::TestSWABoundedReplayGrouping::test_non_cacheable_swa_leaves_hits_to_the_paged_group",
        "core/test_prefix_replay.py::test_hit_replays_window_without_reallocating",
        "core/test_prefix_replay.py::test_replay_only_chunks_make_progress",
        "core/test_prefix_replay.py::test_async_remote_kv_hit_replays_after_load",
        "core/test_prefix_replay.py::test_remote_kv_hit_is_taken_in_whole_blocks",
        "core/test_prefix_replay.py::test_kv_load_carrying_window_does_not_replay",
        "core/test_prefix_replay.py::test_decode_bench_fill_does_not_replay",
        "core/test_prefix_replay.py::test_hit_no_longer_than_window_is_ignored",
        "core/test_prefix_replay.py::test_kv_load_zeroing_respects_loaded_groups",
    ),
    CROSS: (
        "core/test_scheduler.py::test_variable_length_cross_attn_block_allocation",
        "core/test_scheduler.py::test_cross_attn_blocks_not_over_allocated",
        "core/test_scheduler.py::test_cross_attn_blocks_not_under_allocated",
        "core/test_scheduler.py::test_cross_attn_zero_blocks_without_encoder_inputs",
    ),
    DROPS: (
        "core/test_prefix_caching.py::test_eagle_identical_prompt_hit[False-48-1]",
        "core/test_prefix_caching.py::test_eagle_identical_prompt_hit[False-37-1]",
        "core/test_prefix_caching.py::test_eagle_with_sliding_window",
    ),
    HASHER: ("core/test_scheduler.py::test_scheduler_publishes_lookahead_blocks_at_allocation",),
    COPIES: (
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_hybrid_mamba_partial_tail_owner_uses_cow_on_continue",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_internal_checkpoint_uses_partial_hash_lifecycle",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_external_mamba_hit_same_block_uses_running_cow_on_continue",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_boundary_state_offloads_returns_cow_target",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_finished_partial_tail_uses_table_source_once",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_hybrid_mamba_partial_tail_owner_continue_preserves_later_hit",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_cow_retained_blocks_returned_for_release",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_retention_snapshots_handed_off_with_exact_block_ids",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_snapshot_handoff_dense_default_retention",
    ),
    UNFILLED: (
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-False-4-2-2-7-0]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-False-8-16-16-512-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-False-8-16-16-513-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-False-8-128-896-129-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-False-8-128-896-7040-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-False-8-128-896-7168-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-False-8-128-896-7296-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[0-False-8-128-896-7449-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-False-4-2-2-7-0]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-False-8-16-16-512-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-False-8-16-16-513-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-False-8-128-896-129-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-False-8-128-896-7040-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-False-8-128-896-7168-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-False-8-128-896-7296-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_fine_hit_retention_uses_hash_alignment[32-False-8-128-896-7449-1]",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_hybrid_full_attention_partial_hash_hit_uses_cow",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_hybrid_partial_hit_cow_target_starts_uncached",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_hybrid_partial_hash_hit_uses_cow_under_dcp",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_dcp_joint_hit_is_bounded_by_replicated_mamba_snapshots",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[64-1-0-1089-1088]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[128-0-0-1089-1088]",
        "core/test_prefix_caching.py::test_lookahead_checkpoint_has_available_hash[128-1-0-1089-1088]",
    ),
    SAME_STEP: (
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_hybrid_mamba_moved_partial_entry_defers_same_step_hit",
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_prompt_end_checkpoint_survives_sparse_retention_with_coarse_hash",
    ),
    EVERY_INTERVAL: (
        "core/test_prefix_caching.py::test_hybrid_cache_mamba_align_shared_prefix_detection",
        "core/test_prefix_caching.py::test_mamba_shared_prefix_reuse_under_zero_retention",
    ),
    SHED: (
        "core/prefix_cache/test_partial_prefix_cache_hits.py::test_transient_checkpoint_evicts_retained_boundary_hash",
        "core/test_prefix_caching.py::test_hybrid_cache_blocks_swa_tail_window_only",
        "core/test_prefix_caching.py::test_hybrid_cache_blocks_clamped_to_lcm",
        "core/test_prefix_caching.py::test_hybrid_local_kv_retention_interval_aligns_in_manager",
        "core/test_prefix_caching.py::test_hybrid_local_kv_retention_latest_only_reuses_replay_boundary",
        "core/test_prefix_caching.py::test_swa_free_split_keeps_cached_tail_ahead_of_scratch",
        "core/test_prefix_caching.py::test_swa_shared_prefix_reuse_under_zero_retention",
    ),
    ALONE: ("core/test_prefix_caching.py::test_pure_swa_retention_latest_only",),
    EVENTS: (
        "core/test_prefix_caching.py::test_kv_cache_events_with_lora",
        "core/test_prefix_caching.py::test_block_stored_event_session_id",
    ),
    WORDS: (
        "core/test_prefix_caching.py::test_hybrid_local_kv_retention_interval_rejects_invalid",
        "core/test_prefix_caching.py::test_positive_retention_rejects_full_attention",
    ),
    EMPTY: ("core/test_kv_cache_utils.py::test_allocate_with_lookahead",),
}
"""Cases that fail, by why; a name without brackets stands for all cases of a test."""
EXPECTED: Final = {name: reason for reason, names in BY_REASON.items() for name in names}
FEWEST: Final = 200
"""Cases that pass at least."""
SUITE: Final = Suite("tests/v1", "vllm_core_plugin", ("--noconftest",), case_s=120, patience_s=1800)


@dataclass(frozen=True, slots=True)
class Case:
    """What became of a case.

    Args:
        name: file and case, from ``tests/v1``.
        outcome: passed, failed or skipped.
        why: what it said where it failed.
        num_actions: how often rows of a space were allocated or grown for it.
    """

    name: str
    outcome: str
    why: str
    num_actions: int

    @property
    def counts(self) -> bool:
        """Whether it passed by what a space did."""
        return self.outcome == "passed" and self.num_actions > 0

    @property
    def reason(self) -> str | None:
        """Why it is expected to fail; None: it is not."""
        return EXPECTED.get(self.name, EXPECTED.get(self.test))

    @property
    def test(self) -> str:
        """The test of which it is a case."""
        return self.name.partition("[")[0]


def outcomes(vllm: Path, files: Sequence[str], work: Path, manager: str = "ours") -> list[Case]:
    """Run files of theirs, and return what became of each case.

    Args:
        vllm: folder of the source distribution; files: from ``tests/v1``.
        work: an empty folder, for the configurations of models in the hub's form, and logs.
        manager: "ours", or "theirs" for vLLM's own.
    """
    environment = {
        "NUMBA_DISABLE_JIT": "1",
        "PAGEDKV_CORE": manager,
        "PYTHONPATH": os.pathsep.join((str(vllm), str(PEERS), str(PEERS.parents[1] / "src"))),
    }
    found = SUITE.outcomes(vllm, files, work, environment)
    by_name = {each["case"]: Case(each["case"], each["outcome"], each["why"], each["actions"]) for each in found}
    return list(by_name.values())


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return outcomes(SUITE.require_vllm(), FILES, tmp_path_factory.mktemp("core"))


def test_no_case_fails_but_those_that_are_listed(cases: list[Case]) -> None:
    assert [each for each in cases if each.outcome == "failed" and each.reason is None] == []


def test_what_is_listed_fails(cases: list[Case]) -> None:
    failed = {name for each in cases if each.outcome == "failed" for name in (each.name, each.test)}
    assert [name for name in EXPECTED if name not in failed] == []
    assert [each for each in cases if each.outcome == "passed" and each.reason is not None] == []


def test_so_many_pass_by_what_a_space_did(cases: list[Case]) -> None:
    assert sum(each.counts for each in cases) >= FEWEST


def main() -> None:
    """Print how many cases pass, by file, and those that fail, with what is known of each."""
    vllm, *files = [name for name in sys.argv[1:] if name != "--theirs"]
    with TemporaryDirectory() as work:
        found = outcomes(Path(vllm), files or FILES, Path(work), "theirs" if "--theirs" in sys.argv else "ours")
    counts = Counter((each.name.partition("::")[0], each.outcome) for each in found)
    by_space = Counter(each.name.partition("::")[0] for each in found if each.counts)
    lines = [
        f"{counts[file, 'passed']:4d} passed ({by_space[file]:3d} by a space) {counts[file, 'failed']:4d} failed "
        f"{counts[file, 'skipped']:3d} skipped  {file}"
        for file in dict.fromkeys(name for name, _ in counts)
    ]
    failed = [each for each in found if each.outcome == "failed"]
    lines += [f"\n{each.name}\n    {each.reason or each.why}" for each in failed]
    num_passed = sum(each.outcome == "passed" for each in found)
    lines.append(f"\n{num_passed} of {len(found)} passed, {sum(each.counts for each in found)} by a space\n")
    sys.stdout.write("\n".join(lines))


if __name__ == "__main__":
    main()
