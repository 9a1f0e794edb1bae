"""Features on two hosts into S3, submitted from a third: a host, a cable and the driver go. Nothing is lost."""

import functools
import re
import time

from hosts import ROOT, say, wait_for
from small import WRITE_STORE, corpus

ROWS, SHARD, CUT_S = 1000, 256, 30  # two documents a shard: the job lasts as long as the failures
EQUAL = """
import sys
from ray_kit import assert_equal_stores, content
assert_equal_stores(sys.argv[1], sys.argv[2])
print(len(content(sys.argv[1])))
"""


def test_a_wrong_token_is_refused(cluster):
    ask = ["ray", "job", "list", "--address", "http://head:8265"]
    for token in ("0" * 64, ""):
        done = cluster.hosts.run("laptop", ask, RAY_AUTH_MODE="token" if token else "disabled", RAY_AUTH_TOKEN=token)
        assert done.returncode != 0 and re.search(r"401|403|nauth|token", done.stdout + done.stderr), done.stderr
    say("ray: the job server refused a wrong token and no token")


def test_the_store_survives_a_host_a_cable_and_the_driver(cluster, folder):
    hosts = cluster.hosts
    corpus(folder, ROWS, shard_tokens=SHARD)
    undisturbed = hosts.python("store", WRITE_STORE, str(folder / "kept.toml"), str(folder / "alone"), timeout=300)
    undisturbed = undisturbed.strip().splitlines()[-1]
    first = cluster.features("first")
    done = functools.partial(cluster.commits, "store/tiny/")

    def more(n):
        what = f"{n} shards: {hosts.log('first')[-2000:]}"
        wait_for(lambda: first.poll() is not None or done() >= n, 240, what, 0.5)

    more(10)
    at = done()
    hosts.kill("b")
    say(f"ray: killed host b (all its processes, its network) after {at} shards")
    more(at + 10)
    say(f"ray: host a alone went on, {done()} shards; host b is replaced")
    hosts.boot("b")
    cluster.start_worker("b")
    at = done()
    hosts.cut("a")
    began = time.monotonic()
    wait_for(lambda: time.monotonic() - began >= CUT_S, CUT_S + 5, "the cut", 1)
    hosts.mend("a")
    say(f"ray: cut host a's network for {CUT_S} s at {at} shards, mended at {done()}")
    more(done() + 10)
    assert first.poll() is None, f"the job ended by itself: {hosts.log('first')[-3000:]}"
    killed = hosts.end("head", "-m pipeline")
    wait_for(lambda: first.poll() is not None, 60, "the job's end")
    before = done()
    say(f"ray: killed the driver ({killed} processes) at {before} shards; the job is reported as failed")
    assert killed and first.returncode != 0
    second = cluster.features("second")
    wait_for(lambda: second.poll() is not None, 400, f"the second job: {hosts.log('second')[-2000:]}", 0.5)
    assert second.returncode == 0, hosts.log("second")[-3000:]
    result = cluster.result("data")
    counts = result["counts"]
    assert result["complete"] and counts["computed_shards"] <= counts["shards"] - before
    documents = hosts.python(
        "store", EQUAL, undisturbed, result["store_path"], timeout=240,
        PYTHONPATH=f"{ROOT}:{ROOT}/tests/pipeline", **cluster.cluster,
    )  # fmt: skip
    say(
        f"ray: resubmitted; {counts['computed_shards']} of {counts['shards']} shards were missing and computed; all "
        f"{documents.strip()} documents equal the undisturbed store bit for bit"
    )


def test_no_secret_is_in_the_logs_or_the_job(cluster, folder):
    token = (folder / "token").read_text()
    for name in ("first", "second", "head", "a", "b"):
        text = cluster.hosts.log(name)
        assert token not in text and "s3cr3t-of-the-store" not in text, name
    ask = ["ray", "job", "list", "--address", "http://head:8265"]
    shown = cluster.hosts.run("laptop", ask, RAY_AUTH_MODE="token", **cluster.laptop)
    assert shown.returncode == 0 and "second" in shown.stdout
    assert token not in shown.stdout and "s3cr3t-of-the-store" not in shown.stdout
    say("ray: neither the token nor the store's key is in a log or in the job's record")
