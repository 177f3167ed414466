"""What a line of each trace format means; nothing of files.

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

In the order in which they build on each other: ``parsing`` (text into checked numbers), ``row_format`` (what all have
in common), ``messages`` (a conversation in parts), ``lengths`` (parts as tokens, as many as are stated), ``calls``
(calls of a log made into requests), ``bodies`` (bodies, answers and usage of the common interfaces), one
module a format, ``detection`` (which one it is). Every number is checked before it sizes anything, and a bad row raises
:class:`~pagedkv.memory.contract.errors.TraceError` with its line. docs/trace-format.md is the page for users.
"""

from pagedkv.memory.contract.extras import needing

with needing("cli", "reading traces"):
    import msgspec  # noqa: F401 - first of all, so that its absence is reported, whichever format is imported first

from pagedkv.planner.traces.formats.detection import detect_format
from pagedkv.planner.traces.formats.row_format import Reading, RowFormat

__all__ = ["Reading", "RowFormat", "detect_format"]
