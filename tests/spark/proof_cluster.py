"""A standalone master with two workers on this machine, the package shipped to them as a zip. make spark-cluster.

Not in the suite: it is the start of six JVMs.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pika
import pyspark
import pytest
from tests.running_broker import RunningBroker, eventually

from headrace.spark.java import find_java

ROOT = Path(__file__).parent.parent.parent
HOME = Path(pyspark.__file__).parent
COUNT = 64


@pytest.fixture
def python(tmp_path: Path) -> str:
    """One that has all packages but ours: what is not shipped is not there."""
    site = Path(pyspark.__file__).parent.parent
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    made = tmp_path / "python"
    # A folder on PYTHONPATH is not a site: its .pth files, one of which leads to this checkout, do not count.
    made.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{site}" exec {base} "$@"\n')
    made.chmod(0o755)
    done = subprocess.run([str(made), "-c", "import headrace"], capture_output=True, text=True, cwd=tmp_path)
    assert "No module named 'headrace'" in done.stderr
    return str(made)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The wheel, under the name that Spark takes: it is a zip."""
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path / "dist"),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    return wheel.rename(tmp_path / "headrace.zip")


@contextmanager
def running(log: Path, environ: dict[str, str], *command: str) -> Iterator[Path]:
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(HOME / "bin" / "spark-class"), *command],
            env=environ,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield log
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def found(log: Path, pattern: str) -> str:
    eventually(lambda: re.search(pattern, log.read_text()) is not None, 120)
    match = re.search(pattern, log.read_text())
    assert match is not None
    return match[1]


def test_package_is_shipped_and_two_workers_read_the_log_over_http(tmp_path: Path, python: str, package: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    (tokens / "test").write_text("guest:guest")
    java = find_java(os.environ)
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPARK_", "HEADRACE_"))
    } | {
        "JAVA_HOME": str(java.home),
        "SPARK_HOME": str(HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_WORKER_DIR": str(tmp_path / "workers"),
        "PYSPARK_PYTHON": python,
        "HEADRACE_TOKENS": str(tokens),
    }
    values = [os.urandom(128 * 1024) for _ in range(COUNT)]
    with ExitStack() as stack:
        broker = stack.enter_context(RunningBroker(tmp_path, arguments=["--http", "127.0.0.1:0"]))
        channel = broker.connect().channel()
        channel.confirm_delivery()
        channel.queue_declare("orders", durable=True)
        for value in values:
            channel.basic_publish("", "orders", value, pika.BasicProperties(delivery_mode=2))
        deploy = "org.apache.spark.deploy"
        master = stack.enter_context(
            running(
                tmp_path / "master.log",
                environ,
                f"{deploy}.master.Master",
                *("--host", "127.0.0.1", "--port", "0", "--webui-port", "0"),
            )
        )
        address = found(master, r"Starting Spark master at (spark://\S+)")
        for name in ("one", "two"):
            worker = stack.enter_context(
                running(
                    tmp_path / f"{name}.log",
                    environ,
                    f"{deploy}.worker.Worker",
                    *("--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--webui-port", "0", address),
                )
            )
            found(worker, r"(Successfully registered) with master")
        job = shutil.copy(ROOT / "tests" / "spark" / "cluster_job.py", tmp_path)
        settings = {
            "spark.executor.memory": "512m",
            "spark.driver.memory": "512m",
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            # So that each of the two has one before the job begins.
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        }
        command = [str(HOME / "bin" / "spark-submit"), "--master", address, "--py-files", str(package)]
        for name, value in settings.items():
            command += ["--conf", f"{name}={value}"]
        command += [str(job), f"http://127.0.0.1:{broker.ports['http']}", "orders", str(tmp_path)]
        # Executors get what is shipped; what Spark starts on the driver's machine to plan a stream does not.
        done = subprocess.run(
            command, env=environ | {"PYTHONPATH": str(package)}, capture_output=True, text=True, cwd=tmp_path
        )
        told = [line for line in done.stderr.splitlines() if " INFO " not in line and not line.startswith("\tat ")]
        assert done.returncode == 0, "\n".join([*told, done.stdout])
        assert "guest" not in done.stderr + done.stdout
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert (answer["rows"], answer["offsets"], answer["streamed"]) == (COUNT, COUNT, COUNT)
    assert answer["sum"] == sum(map(zlib.crc32, values))
    assert answer["tasks"] >= 4
    assert len(answer["executors"]) == 2
    assert all("headrace.zip" in package for _, package in answer["executors"])
