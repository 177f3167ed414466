"""Readers of the lines of each trace format; they open no files.

The first line determines the format, never the file's name:

=======================  ==============================================================================  ===============
first line has           format                                                                          ids of n tokens
=======================  ==============================================================================  ===============
``format``               ``pagedkv_trace.PagedkvRows``, this project's own                               either
``hash_ids``             ``hash_ids.HashIdRows``, the Mooncake release                                   ``ceil(n / b)``
``hash_runs``            ``hash_runs.HashRunRows``, runs of ids                                          ``n // b``
``requests``             ``sessions.SessionRows``, a session a row                                       ``n // b``
``hash_ids``, chat_id    ``hash_ids.BailianRows``, the Qwen-Bailian traces                               either
``conversations``        ``conversations.ConversationRows``, ShareGPT                                    none: texts
an engine's log          ``engine_logs.EngineLogRows``, vLLM, SGLang                                     none: texts
CSV                      ``csv_rows.CsvRows``, known headers or columns                                  none
any other object         ``object_logs.ObjectLogRows``, by one of the                                    none: texts
                         layouts below
=======================  ==============================================================================  ===============

Layouts of logs of objects: ``chat_logs`` (services), ``litellm``, ``langfuse``, ``helicone``, ``otel_spans``,
``wildchat``, ``bench_results``, and ``fields`` that the user names.

In the order in which they build on each other: ``parsing`` (text into checked numbers), ``row_format`` (the interface
of all formats), ``messages`` (a conversation in parts), ``lengths`` (tokens for parts, as many as are stated),
``calls`` (turns calls of a log into requests), ``bodies`` (bodies, answers and usage of the common interfaces), one
module a format, ``detection`` (determines the format). Every number is checked before it sizes anything, and a bad row
raises :class:`~pagedkv.errors.TraceError` with its line. docs/trace-format.md is the page for users.
"""

from pagedkv.contract.extras import needing

with needing("cli", "reading traces"):
    import msgspec  # noqa: F401 - imported first, so that its absence is reported for every format

from pagedkv.planner.traces.formats.detection import detect_format
from pagedkv.planner.traces.formats.row_format import Reading, RowFormat

__all__ = ["Reading", "RowFormat", "detect_format"]
