"""Readers of the lines of each trace format; they open no files.

The first line determines the format, never the file's name:

=======================  ==============================================================================  ===============
first line has           format                                                                          ids of n tokens
=======================  ==============================================================================  ===============
``format``               ``id_traces.PagedkvRows``, this project's own                                   either
``hash_ids``             ``id_traces.HashIdRows``, the Mooncake release                                  ``ceil(n / b)``
``hash_runs``            ``id_traces.HashRunRows``, runs of ids                                          ``n // b``
``requests``             ``id_traces.SessionRows``, a session a row                                      ``n // b``
``requests``, ``id``     ``id_traces.WekaRows``, a session of agents a row                               ``n // b``
``hash_ids``, chat_id    ``id_traces.BailianRows``, the Qwen-Bailian traces                              either
``conversations``        ``id_traces.ConversationRows``, ShareGPT                                        none: texts
an engine's log          ``engine_logs.EngineLogRows``, vLLM, SGLang                                     none: texts
CSV                      ``csv_rows.CsvRows``, known headers or columns                                  none
any other object         a ``calls.LogRows``, one of those below                                         none: texts
=======================  ==============================================================================  ===============

Logs of objects: ``service_logs`` (services, WildChat, results of benchmarks, fields that the
user names; LiteLLM, Langfuse, Helicone, Bedrock), ``spans`` (OpenTelemetry, OpenInference, LangSmith),
``agent_sessions`` (Claude Code, Codex, TraceLab).

In the order in which they build on each other: ``parsing`` (text into checked numbers; the interface of all formats),
``parts`` (conversations in parts), ``reconciling`` (whether lengths fit them), ``calls`` (parts with as many tokens as
are stated, as requests), a module a family of formats; the reader of traces determines the format. Every number is
checked before it sizes anything, and a bad row raises :class:`~pagedkv.errors.TraceError` with its line.
docs/trace-format.md is the page for users.
"""

from pagedkv.contract.extras import needing

with needing("cli", "reading traces"):
    import msgspec  # noqa: F401 - imported first, so that its absence is reported for every format
