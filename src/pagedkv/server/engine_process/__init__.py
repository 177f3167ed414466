"""An engine in a process of its own, so that HTTP and the engine do not share one interpreter.

::

    the server's process                                      the engine's process
    Service -- ProcessEngine -- commands, by a socket pair --> EngineChild -- EngineThread -- LLM
                    `---------- <-- news after each step -----------'
    inspector -- ProcessInspected -- questions, by another -->    InspectionChild -- InspectedEngine
                      `------------- <-- one reply to each ------------'

Reading order: ``messages`` (what is sent, and how), ``child`` (the engine's process), ``process_engine`` (the server's
side), and ``inspection`` (both sides of the inspector).
"""

from pagedkv.server.engine_process.messages import EventEndpoints, ProcessSpec
from pagedkv.server.engine_process.process_engine import ProcessEngine

__all__ = ["EventEndpoints", "ProcessEngine", "ProcessSpec"]
