"""The engine's process: ``python -m pagedkv.server.engine_process FD [FD]``, which only ProcessEngine starts.

The second descriptor is of the inspector's socket, if there is an inspector.
"""

import socket
import sys

from pagedkv.server.engine_process.child import serve

if __name__ == "__main__":
    serve(*(socket.socket(fileno=int(each)) for each in sys.argv[1:]))
