"""An S3 server for the tests of the store."""

import logging
import os
import urllib.request

import pytest


@pytest.fixture(scope="module")
def bucket():
    """`s3://bucket` on moto's server, on a loopback port of its own; its address is in the environment meanwhile."""
    moto_server = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
    before = {k: os.environ.get(k) for k in settings}
    os.environ.update(settings)
    urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT"))
    yield "s3://bucket"
    server.stop()
    for key, value in before.items():
        os.environ.pop(key)
        if value is not None:
            os.environ[key] = value
