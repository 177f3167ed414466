"""The engine's process: ``python -m pagedkv.serving.server.engine_process FD``, which only ProcessEngine starts."""

import socket
import sys

from pagedkv.serving.server.engine_process.child import serve

if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
