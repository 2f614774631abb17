"""tandemctl, as an operator uses it: a cluster that comes up, answers, heals, and goes down without a trace."""
import contextlib
import json
import os
import pathlib
import pty
import select
import shutil
import signal
import subprocess
import time

import pytest

from conftest import BIN, GOLDENS, MODEL, PATIENCE, free_port, golden, expect_golden, http_get, wait_until

CTL = str(BIN / "tandemctl")


def ctl(*args, stdin=None, timeout=120):
    return subprocess.run([CTL, *map(str, args)], input=stdin, capture_output=True, text=True, timeout=timeout)


class Up:
    """A running `tandemctl up`."""

    def __init__(self, directory, *flags, model=MODEL):
        self.run_dir = pathlib.Path(directory) / "run"
        self.cluster_file = self.run_dir / "cluster.json"
        self.process = subprocess.Popen([CTL, "up", "--model", str(model), "--run-dir", str(self.run_dir), *flags],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_ready(self):
        def look():
            assert self.process.poll() is None, self.process.communicate()
            return self.cluster_file.exists()
        wait_until("cluster.json", look, PATIENCE)
        return self

    def cluster(self):
        return json.loads(self.cluster_file.read_text())

    def pids(self):
        c = self.cluster()
        return [c["router"]["pid"]] + [w["pid"] for w in c["prefill"] + c["decode"]]

    def stop(self, signum=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(signum)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


def is_running(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.fixture
def new_up(tmp_path):
    started = []

    def start(*flags, **settings):
        started.append(Up(tmp_path, *flags, **settings))
        return started[-1]

    yield start
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
        up.process.communicate()


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    u = Up(tmp_path_factory.mktemp("ctl")).wait_ready()
    yield u
    code, out, err = u.stop()
    assert code == 0, (out, err)


def generate(up, *args):
    done = ctl("generate", "--run-dir", up.run_dir, "--json", *args)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_prompt_of_ids_is_continued_as_the_goldens_say(up):
    prompt = golden(next(p["name"] for p in GOLDENS["prompts"] if 20 < len(p["ids"]) < 200))
    r = generate(up, "--token-ids", ",".join(map(str, prompt["ids"])), "--max-tokens", len(prompt["greedy"]),
                 "--temperature", 0, "--logprobs", 3)
    assert expect_golden(r["token_ids"], prompt, bound=0.05) > 0
    assert len(r["logprobs"]) == len(r["token_ids"]) == r["usage"]["completion_tokens"]
    for token, p in zip(r["token_ids"], r["logprobs"]):
        assert p["id"] == token and len(p["top"]) == 3 and p["top"][0]["logprob"] >= p["top"][1]["logprob"]
    assert r["usage"]["prompt_tokens"] == len(prompt["ids"])
    assert r["timing"]["handoff_bytes"] > 0 and r["timing"]["transport"] and r["timing"]["prefill_worker"] == "prefill-0"


def test_a_seed_repeats_and_is_reported(up):
    first = generate(up, "--text", "Roll a die.", "--max-tokens", 20, "--ignore-eos")
    assert len(first["token_ids"]) == 20 and first["finish_reason"] == "length" and first["logprobs"] is None
    again = generate(up, "--text", "Roll a die.", "--max-tokens", 20, "--ignore-eos", "--seed", first["seed"])
    assert again["token_ids"] == first["token_ids"]


def test_text_streams_without_json(up):
    done = ctl("generate", "--run-dir", up.run_dir, "--text", "Hello", "--max-tokens", 5, "--temperature", 0, "--stats")
    assert done.returncode == 0 and done.stdout.strip() and "first token" in done.stderr


def test_chat_shows_reasoning_apart_from_the_answer(up):
    done = ctl("chat", "--run-dir", up.run_dir, "--temperature", 0, "--stats", "What is 47 + 38?")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("thinking: ") and "85" in lines[-1] and not lines[-1].startswith("thinking")
    assert "KV moved: " in done.stderr and "tokens/s" in done.stderr
    assert "UCX" in done.stderr or "KV moved: 0 B" in done.stderr   # a decode worker that knows the beginning needs no other
    assert "<|" not in done.stdout


def test_low_effort_and_instructions_reach_the_model(up):
    done = ctl("chat", "--run-dir", up.run_dir, "--temperature", 0, "--effort", "low", "--system", "Answer in upper case.",
               "What is the capital of France?")
    assert done.returncode == 0 and "thinking" not in done.stdout and "PARIS" in done.stdout


def test_the_question_may_come_on_standard_input(up):
    done = ctl("chat", "--run-dir", up.run_dir, "--temperature", 0, stdin="Spell the word bridge.\n")
    assert done.returncode == 0 and "b-r-i-d-g-e" in done.stdout


def test_a_conversation_remembers_and_ctrl_c_stops_an_answer(up):
    prompt = b"> \x1b[0m"
    pid, fd = pty.fork()
    if pid == 0:
        os.execv(CTL, [CTL, "chat", "--run-dir", str(up.run_dir), "--temperature", "0", "--effort", "low"])

    def read_until(mark):
        seen, end = b"", time.monotonic() + 60
        while mark not in seen:
            assert time.monotonic() < end, seen
            if select.select([fd], [], [], 1)[0]:
                seen += os.read(fd, 4096)
        return seen.decode(errors="replace")

    read_until(prompt)
    os.write(fd, b"My name is Alice.\n")
    read_until(prompt)
    os.write(fd, b"Tell a short story about a fox and a lake.\n")
    read_until(b"Once")
    os.write(fd, b"\x03")
    read_until(prompt)
    os.write(fd, b"What is my name?\n")
    assert "Alice" in read_until(prompt)
    os.write(fd, b"/new\n")
    read_until(prompt)
    os.write(fd, b"What is my name?\n")
    assert "Alice" not in read_until(prompt)
    os.write(fd, b"\n")
    assert os.waitpid(pid, 0)[1] == 0
    os.close(fd)


def test_the_servers_refusal_is_told(up):
    done = ctl("chat", "--run-dir", up.run_dir, "--effort", "extreme", "Hello")
    assert done.returncode == 1 and "INVALID" in done.stderr and "effort" in done.stderr
    done = ctl("generate", "--run-dir", up.run_dir, "--token-ids", "4000000000")
    assert done.returncode == 1 and "INVALID" in done.stderr


def test_status_lists_the_workers(up):
    done = ctl("status", "--run-dir", up.run_dir)
    assert done.returncode == 0 and "prefill-0" in done.stdout and "decode-0" in done.stdout and "ready" in done.stdout
    raw = json.loads(ctl("status", "--run-dir", up.run_dir, "--json").stdout)
    assert {w["name"] for w in raw["state"]["workers"]} == {"prefill-0", "decode-0"}


def test_a_second_cluster_in_the_folder_is_refused(up):
    done = ctl("up", "--model", MODEL, "--run-dir", up.run_dir)
    assert done.returncode == 1 and "another cluster" in done.stderr
    assert up.cluster_file.exists()


def test_wrong_use_is_answered_with_status_2():
    for args in [(), ("nonsense",), ("up", "--nonsense"), ("generate", "--router", "x:1"), ("drain",), ("tokenize", "--text", "a"),
                 ("generate", "--text", "a", "--token-ids", "1"), ("chat", "a", "b")]:
        done = ctl(*args)
        assert done.returncode == 2 and done.stderr and not done.stdout, args
    for command in ["up", "generate", "chat", "status", "tokenize", "detokenize", "drain"]:
        done = ctl(command, "--help")
        assert done.returncode == 0 and f"usage: tandemctl {command}" in done.stdout and not done.stderr


def test_nobody_there_is_an_error_and_not_a_wait():
    done = ctl("chat", "--router", f"127.0.0.1:{free_port()}", "Hello", timeout=30)
    assert done.returncode == 1 and done.stderr
    done = ctl("status", "--run-dir", "/no/such/folder")
    assert done.returncode == 1 and "cluster.json" in done.stderr


def test_tokens_and_text_convert_without_a_cluster(tmp_path):
    for case in GOLDENS["tokenizer"][::4]:
        if not case["text"] or "\0" in case["text"]:
            continue
        file = tmp_path / "text"
        file.write_bytes(case["text"].encode())
        done = ctl("tokenize", "--model", MODEL, "--file", file, "--special")
        assert json.loads(done.stdout) == {"n_tokens": len(case["ids"]), "token_ids": case["ids"]}
        back = json.loads(ctl("detokenize", "--model", MODEL, "--file", "-", "--special", stdin=done.stdout).stdout)
        assert back["text"] == case["text"] and back["is_utf8"]
    broken = json.loads(ctl("detokenize", "--model", MODEL, "--token-ids", "39,240").stdout)
    assert broken["is_utf8"] is False and broken["text"].startswith("H")


def test_dead_daemons_are_started_again_and_the_router_keeps_its_addresses(new_up):
    up = new_up().wait_ready()
    before = up.cluster()
    os.kill(before["decode"][0]["pid"], signal.SIGKILL)

    def is_back(role):
        return lambda: (up.cluster()[role] != before[role]) and http_get(before["router"]["http"], "/readyz")[0] == 200
    wait_until("a new decode worker", is_back("decode"), PATIENCE)
    assert ctl("chat", "--run-dir", up.run_dir, "--temperature", 0, "What is 47 + 38?").stdout.rstrip().endswith("85.")
    middle = up.cluster()
    os.kill(middle["router"]["pid"], signal.SIGKILL)
    wait_until("a new router", lambda: up.cluster()["router"]["pid"] != middle["router"]["pid"], PATIENCE)
    after = up.cluster()
    assert (after["router"]["rpc"], after["router"]["http"]) == (before["router"]["rpc"], before["router"]["http"])
    wait_until("workers join the new router", lambda: http_get(after["router"]["http"], "/readyz")[0] == 200, PATIENCE)
    assert ctl("chat", "--run-dir", up.run_dir, "--temperature", 0, "What is 47 + 38?").stdout.rstrip().endswith("85.")
    code, _, err = up.stop()
    assert code == 0 and "decode-0 ended (killed by SIGKILL)" in err and "router ended" in err


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_curl_command_that_it_prints_can_be_pasted(new_up):
    up = new_up().wait_ready()
    lines = []
    while not any(line.startswith("Ctrl-C") for line in lines):
        lines.append(up.process.stdout.readline())
    text = "".join(lines)
    command = text[text.index("curl "):text.index("OpenAI's API")]
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant", (text, done)


def test_sigint_ends_all_well_and_leaves_no_process(new_up):
    up = new_up("--prefill", "2").wait_ready()
    pids = up.pids()
    assert len(pids) == 4 and all(map(is_running, pids))
    code, out, err = up.stop(signal.SIGINT)
    assert code == 0, (out, err)
    assert not any(map(is_running, pids))
    assert not up.cluster_file.exists()


def test_a_running_answer_ends_well_while_the_cluster_stops(new_up):
    up = new_up("--decode-flag=--layer-delay=10").wait_ready()
    with subprocess.Popen([CTL, "generate", "--run-dir", str(up.run_dir), "--text", "Hello", "--max-tokens", "40", "--ignore-eos",
                           "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as call:
        wait_until("the request runs", lambda: json.loads(http_get(up.cluster()["router"]["http"], "/statez")[1])["state"]["running"] > 0)
        code, out, err = up.stop()
        answer, words = call.communicate(timeout=60)
    assert code == 0, (out, err)
    assert call.returncode == 0 and len(json.loads(answer)["token_ids"]) == 40, words


def test_a_killed_supervisor_takes_its_daemons_with_it(new_up):
    up = new_up().wait_ready()
    pids = up.pids()
    up.process.kill()
    wait_until("all daemons are gone", lambda: not any(map(is_running, pids)), 10)


def test_a_daemon_that_cannot_start_ends_all_with_its_last_words(new_up, tmp_path):
    bad = new_up("--decode-flag=--nonsense=1")
    code, out, err = bad.stop() if bad.process.wait(PATIENCE) is None else (bad.process.returncode, *bad.process.communicate())
    assert code == 1 and "decode-0" in err and "--nonsense" in err
    assert not bad.cluster_file.exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    wrong = new_up(model=empty)
    wrong.process.wait(PATIENCE)
    assert wrong.process.returncode == 1 and "tokenizer.json" in wrong.process.communicate()[1]


def test_a_port_in_use_is_told(new_up):
    import socket
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        up = new_up("--http-address", f"127.0.0.1:{taken.getsockname()[1]}")
        up.process.wait(PATIENCE)
    assert up.process.returncode == 1 and "router ended before it was ready" in up.process.communicate()[1]


def test_a_drained_worker_takes_no_more(new_up):
    up = new_up("--prefill", "2").wait_ready()
    worker = up.cluster()["prefill"][1]
    done = ctl("drain", worker["rpc"])
    assert done.returncode == 0, done.stderr
    wait_until("the worker drains", lambda: "draining" in ctl("status", "--run-dir", up.run_dir).stdout
               or up.cluster()["prefill"][1]["pid"] != worker["pid"], 20)
    assert ctl("chat", "--run-dir", up.run_dir, "--temperature", 0, "What is 47 + 38?").returncode == 0
