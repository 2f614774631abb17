"""A short soak in a process of its own (it enters a private IPC namespace): see soak.py."""
import os
import subprocess
import sys

from conftest import BUILD, IS_SANITIZED, ROOT


def test_nothing_leaks_while_workers_are_killed(tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "tests/cluster/soak.py"), "--quick", "--directory", str(tmp_path / "soak")],
                          env={**os.environ, "BUILD": str(BUILD)}, capture_output=True, text=True,
                          timeout=600 if not IS_SANITIZED else 1800)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "soak: passed" in done.stdout
