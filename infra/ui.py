"""The MLflow pages of this folder's runs, on loopback."""

import os
import socket
import sys

from infra.errors import ResourceError
from infra.tracking import tracking_uri, view_path


def ui(port: int) -> int:
    """Serve until Ctrl-C.

    Raises:
        ResourceError: the port is taken, or is no port.
    """
    if not 0 < port < 65536:
        raise ResourceError(f"PORT={port} is no TCP port; choose one from 1024 to 65535")
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError as e:
            raise ResourceError(
                f"port {port} on 127.0.0.1 cannot be used ({e.strerror}); stop the program there, or run "
                f"make ui PORT={port + 1}"
            ) from None
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    server = f"http://127.0.0.1:{port}"
    print(f"MLflow on {server} (ready after up to a minute; Ctrl-C ends it)", flush=True)
    if path := view_path(MlflowClient(tracking_uri())):
        print(f"drafters by τ:  {server}/{path}", flush=True)
    os.execv(
        sys.executable,
        [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
        + ["--backend-store-uri", tracking_uri(), "--workers", "1"],
    )
