"""`--isolation sandbox`: what a tool or a function tries against the run, its key, its store and the machine."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import threading
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from commands import Finished, run_osmosis
from osmosis_ai.errors import UsageError
from osmosis_ai.runtime.bubblewrap import find_bwrap
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, by_turn, text, tool_call, tool_calls
from repos import ADDING, write_repo
from running import running
from waiting import eventually
from watching import Watching, rewards


def why_not() -> str:
    try:
        find_bwrap()
    except UsageError as error:
        return str(error)
    return ""


NO_SANDBOX = why_not()
pytestmark = [pytest.mark.skipif(bool(NO_SANDBOX), reason=NO_SANDBOX), pytest.mark.xdist_group("sandbox")]

KEY = "sk-key-90817263"
VARIABLE = "sk-var-11223344"
FILED = "sk-env-55667788"
SECRETS = "sk-[kve][ean][yrv]-[0-9]{8}"
TRUTHS = "truth-[0-9]{8}"

RUNNING = '''
import contextlib
import io
import time

from fastmcp import FastMCP
from osmosis_ai import current_rollout

mcp = FastMCP("running")


@mcp.tool
def run(code: str) -> str:
    """Run Python code and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"current_rollout": current_rollout})
    return printed.getvalue()


@mcp.tool
async def spin() -> str:
    """Hold the event loop."""
    time.sleep(3600)
'''

REWARDS = """
import os
import struct

from osmosis_ai import osmosis_reward


@osmosis_reward
def exact(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return 1.0 if solution_str.strip() == ground_truth else 0.0


@osmosis_reward
def hostile(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    if extra_info["attack"] == "score under another name":
        frame = b'{"type": "Scored", "score": {"function": "forged", "value": 1e9}}'
        for descriptor in range(3, 20):
            try:
                os.write(descriptor, struct.pack(">I", len(frame)) + frame)
            except OSError:
                pass
    if extra_info["attack"] == "end the scorer":
        os._exit(7)
    return 0.5
"""

SEARCH = '''
import re, os

def search(pattern, pids):
    """Return what the memory of processes holds of a pattern, which itself doesn't match."""
    found = set()
    for pid in pids:
        try:
            maps = open(f"/proc/{pid}/maps").read()
            memory = open(f"/proc/{pid}/mem", "rb", 0)
        except OSError:
            continue
        for start, end in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw", maps, re.M):
            try:
                memory.seek(int(start, 16))
                found |= set(re.findall(pattern, memory.read(int(end, 16) - int(start, 16))))
            except (OSError, ValueError, OverflowError):
                continue
    return sorted(found)

pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
'''

SEND = """
import os, struct, json

def send(record):
    frame = record if isinstance(record, bytes) else json.dumps(record).encode()
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, struct.pack(">I", len(frame)) + frame)
        except OSError:
            pass
"""


class Attack(NamedTuple):
    """An attack by a tool: its code, what it prints, and, if its rollout fails, why."""

    code: str
    prints: str = ""
    failure: str = ""


TRYING = """
def tried(action, *arguments):
    try:
        print(action(*arguments))
    except Exception as error:
        print(type(error).__name__)
"""

ATTACKS = {
    "environment": Attack(f"import os, re\nprint(re.findall({SECRETS!r}, repr(os.environ)))", "[]"),
    "environments of all": Attack(
        SEARCH + f"print([p for p in pids if re.search({SECRETS!r}, open(f'/proc/{{p}}/environ').read())])", "[]"
    ),
    "keys in memory": Attack(SEARCH + f"print(search({SECRETS!r}.encode(), pids))", "[]"),
    "ground truths in memory": Attack(SEARCH + f"print(search({TRUTHS!r}.encode(), pids))", "[]"),
    "ground truths in the dataset": Attack(TRYING + "tried(open, 'test_data.jsonl')", "FileNotFoundError"),
    "memory of the parent": Attack(TRYING + "import os\ntried(open, f'/proc/{os.getppid()}/mem')", "FileNotFoundError"),
    "the parent's process": Attack("import os\nprint(os.getppid())", "0"),
    "ptrace everybody": Attack(
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "print([p for p in range(2, 70000) if p != os.getpid() and libc.ptrace(16, p, 0, 0) == 0 and p > 9])",
        "[]",
    ),
    "the command's signal": Attack("import os, time\nos.kill(-1, 9)\ntime.sleep(9)", failure="killed by SIGKILL"),
    "descriptors": Attack(
        "import os\nprint(sorted({os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in os.listdir('/proc/self/fd')"
        " if os.path.exists(f'/proc/self/fd/{n}')} - {'pipe', 'socket', 'anon_inode', '/dev/null'}))",
        "[]",
    ),
    "the store": Attack(TRYING + "import os\ntried(os.listdir, '.osmosis')", "FileNotFoundError"),
    "the store anywhere": Attack(
        "import os\nfound = [top for top, _, files in os.walk('/') if 'runs.db' in files]\nprint(found)",
        "[]",
    ),
    "a store of its own": Attack(
        TRYING + "import sqlite3\ntried(sqlite3.connect, '.osmosis/runs.db')", "OperationalError"
    ),
    "a file that replaces a hidden one": Attack(
        TRYING + "import time\ndeadline = time.monotonic() + 60\n"
        "import os\nwhile not os.path.exists('mcp/replaced') and time.monotonic() < deadline:\n    time.sleep(0.05)\n"
        "tried(open, '.env.local')",
        "FileNotFoundError",
    ),
    "a link out of the repository": Attack(
        "import os\nprint(os.path.islink('data'), os.path.exists('data'))", "True False"
    ),
    "keys in .env": Attack(TRYING + "tried(open, '.env')\ntried(lambda: open('mcp/.env').read())", "FileNotFoundError"),
    "history": Attack(TRYING + "import os\ntried(os.listdir, '.git')", "FileNotFoundError"),
    "home": Attack(
        "import os, pathlib\nprint(os.path.expanduser('~'), pathlib.Path('~/.ssh').expanduser().exists())", "/tmp False"
    ),
    "the repository": Attack(TRYING + "tried(open, 'mcp/main.py', 'a')", "OSError"),
    "the system": Attack(
        TRYING + "tried(open, '/etc/passwd', 'a')\ntried(open, '/usr/x', 'w')\ntried(open, '/x', 'w')",
        "OSError\nOSError\nOSError",
    ),
    "the kernel": Attack(TRYING + "tried(open, '/proc/sys/kernel/core_pattern', 'w')", "OSError"),
    "its own sandboxes": Attack(
        "import subprocess\nprint(subprocess.run(['unshare', '-Ur', 'true'], stderr=-3).returncode)", "1"
    ),
    "mounts": Attack("import ctypes\nprint(ctypes.CDLL(None).mount(b'none', b'/usr', b'tmpfs', 0, 0))", "-1"),
    "capabilities": Attack(
        "import re\nprint(set(re.findall(r'Cap\\w+:\\s+(\\w+)', open('/proc/self/status').read())))",
        "{'0000000000000000'}",
    ),
    "links out of the scratch folder": Attack(
        TRYING + "import os\nos.symlink('/root/.bashrc', '/tmp/a')\nos.symlink('HERE/.osmosis/runs.db', '/tmp/b')\n"
        "tried(open, '/tmp/a')\ntried(open, '/tmp/b')",
        "FileNotFoundError\nFileNotFoundError",
    ),
    "leave a file": Attack(
        "open('/tmp/left', 'w').write('x')\nprint((current_rollout().scratch / 'a').write_text('x'))", "1"
    ),
    "find a file": Attack("import os\nprint('left' in os.listdir('/tmp'))", "False"),
    "loopback": Attack(
        TRYING + "import socket\ntried(socket.create_connection, ('127.0.0.1', PORT))", "ConnectionRefusedError"
    ),
    "abstract socket": Attack(
        TRYING + "import socket\ntried(socket.socket(socket.AF_UNIX).connect, '\\0ABSTRACT')", "ConnectionRefusedError"
    ),
    "survivor": Attack(
        "import subprocess\nsubprocess.Popen(['sleep', '86399'], start_new_session=True)\nprint('started')", "started"
    ),
    "end of its rollout": Attack(
        SEND
        + "send({'type': 'RolloutDone', 'job': 'x', 'finish_reason': 'stop', 'duration_ms': 1})\n"
        + "import time\ntime.sleep(9)",
        failure="it sent what can't be read",
    ),
    "answer to nobody": Attack(
        SEND + "send({'type': 'Answered', 'number': 7, 'outcome': {'text': 'forged'}})\nimport time\ntime.sleep(9)",
        failure="it sent what nobody asked for: Answered",
    ),
    "score by a tool": Attack(
        SEND + "send({'type': 'Scored', 'score': {'function': 'exact', 'value': 1.0}})\nimport time\ntime.sleep(9)",
        failure="it sent what nobody asked for: Scored",
    ),
    "bytes": Attack(SEND + "send(b'{x}')\nimport time\ntime.sleep(9)", failure="it sent what can't be read"),
    "a frame of 4 GiB": Attack(
        "import os, time\n[os.write(n, b'\\xff' * 64) for n in map(int, os.listdir('/proc/self/fd')) if n > 2 and "
        "os.path.exists(f'/proc/self/fd/{n}') and 'socket' in os.readlink(f'/proc/self/fd/{n}')]\ntime.sleep(9)",
        failure="it sent what can't be read: ValueError: a record of",
    ),
    "fork bomb": Attack(
        "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(60)", failure="processes"
    ),
    "memory bomb": Attack("kept = []\nwhile True:\n    kept.append(bytearray(1 << 24))", failure="memory"),
    "memory that nobody may look at": Attack(
        "import ctypes, time\nctypes.CDLL(None).prctl(4, 0)\nkept = [bytearray(b'x') * (1 << 30)]\ntime.sleep(60)",
        failure="it held more than 512 MiB of memory",
    ),
    "memory that nobody holds": Attack(
        TRYING + "import ctypes, os\ntried(os.memfd_create, 'a')\nprint(ctypes.CDLL(None).shmget(0, 1 << 30, 0o1600))",
        "PermissionError\n-1",
    ),
    "keyrings": Attack("import ctypes\nprint(ctypes.CDLL(None).syscall(NUMBER, 6, -3, 0, 0))", "-1"),
    "memory of many": Attack(
        "import os, time\nfor _ in range(9):\n    if os.fork() == 0:\n"
        "        kept = bytearray(os.urandom(1 << 20)) * 90\n"
        "        time.sleep(60)\ntime.sleep(60)",
        failure="it held more than 512 MiB of memory",
    ),
    "a flood on stdout": Attack(
        "import os\nfor _ in range(200):\n    os.write(1, b'x' * 99999 + b'\\n')\nprint('done')", "done"
    ),
    "a large result": Attack("print('x' * 80_000_000)", "Error: the result has 76 MiB, and a sandbox may send 64 MiB"),
    "end of its process": Attack("import os\nos._exit(7)", failure="exited with code 7 (while running run)"),
    "segmentation fault": Attack("import ctypes\nctypes.string_at(0)", failure="killed by SIGSEGV (while running run)"),
    "threads": Attack(
        TRYING + "import threading, time\n"
        "def many():\n    for _ in range(9999):\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "tried(many)",
        "RuntimeError",
    ),
    "score under another name": Attack("print(1)", "1"),
    "end the scorer": Attack("print(1)", "1"),
}


class Ran(NamedTuple):
    """A finished run over every attack."""

    done: Finished
    root: Path
    rollouts: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("sandbox")
    rows = [
        {"system_prompt": "s", "user_prompt": name, "ground_truth": f"truth-{number:08d}", "attack": name}
        for number, name in enumerate(ATTACKS)
    ]
    root = write_repo(folder / "repo", main=RUNNING, rewards=REWARDS, rows=rows)
    (root / ".env.local").touch()
    (root / ".env").write_text(f"SERVICE_TOKEN={FILED}\n", encoding="utf-8")
    (root / "mcp" / ".env").write_text(f"SERVICE_TOKEN={FILED}\n", encoding="utf-8")
    (root / "data").symlink_to(tmp_path_factory.mktemp("elsewhere"))
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("[user]\n", encoding="utf-8")
    abstract = f"osmosis-{os.getpid()}"
    with (
        socket.socket(socket.AF_UNIX) as listening,
        ScriptedEndpoint(lambda request: reply(request)).run_in_thread() as at,
    ):
        listening.bind(f"\0{abstract}")
        listening.listen()
        port = at.url.split(":")[2].split("/")[0]

        keyctl = {"x86_64": "250"}.get(platform.machine(), "219")

        def replace() -> None:
            (root / "new").write_text(f"SERVICE_TOKEN={FILED}\n", encoding="utf-8")
            (root / "new").replace(root / ".env.local")
            (root / "mcp" / "replaced").touch()

        def reply(request: Request) -> Reply:
            name = request.messages[1]["content"]
            if request.turn:
                return text("done")
            if "replaces" in name:
                # While the tool runs, as an editor saves.
                threading.Timer(0.5, replace).start()
            code = (
                ATTACKS[name]
                .code.replace("PORT", port)
                .replace("ABSTRACT", abstract)
                .replace("HERE", str(root))
                .replace("NUMBER", keyctl)
            )
            return tool_call("run", code=code)

        model = ["--base-url", at.url, "--model", "scripted", "--api-key", KEY]
        limits = ["--worker-memory", "512MB", "--tool-timeout", "60", "--workers", "1", "--batch-size", "4"]
        done = run_osmosis(
            *("test", *model, "--isolation", "sandbox", *limits, "-q", "--json"),
            cwd=root,
            env={"OPENAI_API_KEY": VARIABLE},
        )
    exported = run_osmosis("runs", "export", "latest", "-o", str(folder / "out.jsonl"), cwd=root)
    assert exported.code == 0, exported.stderr
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    return Ran(done, root, {line["messages"][1]["content"]: line for line in lines})


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_fails_and_costs_its_own_rollout_at_most(name: str, ran: Ran) -> None:
    attack = ATTACKS[name]
    result = ran.done.json["results"][list(ATTACKS).index(name)]
    if attack.failure:
        assert attack.failure in result["error"], result
        return
    assert result["error"] is None
    (said,) = [message["content"] for message in ran.rollouts[name]["messages"] if message["role"] == "tool"]
    assert said.strip()[:200] == attack.prints


def test_the_keys_are_where_the_search_looks_without_a_sandbox(tmp_path: Path) -> None:
    """Otherwise the attacks above would prove nothing."""
    code = ATTACKS["keys in memory"].code.replace("pids))", "[os.getpid()]))")
    rows = [{"system_prompt": "s", "user_prompt": "u", "ground_truth": "1"}]
    root = write_repo(tmp_path / "repo", main=RUNNING, rows=rows)
    script = by_turn(tool_call("run", code=code), text("1"))
    with ScriptedEndpoint(script).run_in_thread() as at:
        model = ["--base-url", at.url, "--model", "scripted", "--api-key", KEY]
        run_osmosis("test", *model, "-q", cwd=root)
    assert "[masked]" in run_osmosis("runs", "show", "latest", "--row", "0", cwd=root).stdout


def test_scores_come_from_the_function_that_was_asked_for(ran: Ran) -> None:
    shown = {
        name: run_osmosis("runs", "show", "latest", "--row", str(list(ATTACKS).index(name)), cwd=ran.root).stdout
        for name in ("score under another name", "end the scorer", "environment")
    }
    assert "something else than the score of reward_fn.rewards:hostile" in shown["score under another name"]
    assert "exited with code 7" in shown["end the scorer"]
    for name, stdout in shown.items():
        assert "forged" not in stdout
        # The other function's score is there.
        assert "exact" in stdout, name
    (functions,) = (
        [{score["function"] for score in ran.done.json["functions"]}] if "functions" in ran.done.json else [set()]
    )
    assert functions <= {"reward_fn.rewards:exact", "reward_fn.rewards:hostile"}


def test_nothing_that_an_attack_started_is_left(ran: Ran) -> None:
    def survivors() -> list[psutil.Process]:
        return [found for found in psutil.process_iter(["cmdline"]) if "86399" in (found.info["cmdline"] or ())]

    eventually(lambda: not survivors(), lambda: str(survivors()))


def test_the_log_of_a_flood_is_bounded(ran: Ran) -> None:
    (log,) = (ran.root / ".osmosis" / "logs").glob("*.log")
    assert log.stat().st_size < 4 << 20
    assert not re.search(SECRETS, log.read_text(encoding="utf-8"))


KNOWING = """
import json
import os

from fastmcp import Context, FastMCP
from mcp.types import SamplingMessage, TextContent
from osmosis_ai import current_rollout, osmosis_setup

mcp = FastMCP("knowing")
CALLS = []


@osmosis_setup
def fill() -> None:
    (current_rollout().scratch / "note").write_text(f"row {current_rollout().row_index}")


@mcp.tool
async def look() -> str:
    \"\"\"Show what the rollout has.\"\"\"
    CALLS.append(1)
    rollout = current_rollout()
    return json.dumps([rollout.metadata["level"], (rollout.scratch / "note").read_text(), len(CALLS)])


@mcp.tool
async def ask(ctx: Context) -> str:
    \"\"\"Ask the model.\"\"\"
    message = SamplingMessage(role="user", content=TextContent(type="text", text="Say it."))
    return (await ctx.session.create_message([message], max_tokens=33)).content.text


@mcp.tool
def fail() -> str:
    \"\"\"Raise.\"\"\"
    raise KeyError("shop.db")
"""


def test_tools_in_a_sandbox_know_their_rollout_and_may_ask_its_model(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main=KNOWING)

    def script(request: Request) -> Reply:
        if request.messages[-1]["content"] == "Say it.":
            return text("said")
        if request.turn == 0:
            return tool_calls([("look", {}), ("ask", {}), ("fail", {}), ("gone", {})])
        return tool_call("look") if request.turn == 1 else text("done")

    with ScriptedEndpoint(script).run_in_thread() as at:
        model = ["--base-url", at.url, "--model", "scripted"]
        done = run_osmosis("test", *model, "--isolation", "sandbox", "--workers", "1", cwd=root)
        ends = [request.messages for request in at.requests if request.turn == 2]
    assert done.code == 0, done.stderr
    results = sorted([message["content"] for message in messages if message["role"] == "tool"] for messages in ends)
    assert [(found[0], found[1], found[4]) for found in results] == [
        (json.dumps([level, f"row {row}", 1]), "said", json.dumps([level, f"row {row}", 2]))
        for row, level in enumerate((1, 3, 5))
    ]
    assert all("shop.db" in found[2] and "there is no tool 'gone'" in found[3] for found in results)
    # The tool's exception has its place, as without a sandbox.
    assert "mcp/main.py:36" in done.stdout


def test_a_failing_setup_function_fails_its_rollout(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main=KNOWING.replace("def fill() -> None:", "def fill() -> None:\n    1 / 0"))
    options = ["--model", "offline/smoke", "--isolation", "sandbox", "--workers", "1", "--limit", "1", "--json"]
    done = run_osmosis("test", *options, cwd=root)
    assert done.json["results"][0]["error"] == "setup: fill raised ZeroDivisionError: division by zero"


def test_code_that_holds_the_event_loop_loses_its_sandbox(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main=RUNNING)
    with ScriptedEndpoint(by_turn(tool_call("spin"), text("done"))).run_in_thread() as at:
        model = ["--base-url", at.url, "--model", "scripted", "--tool-timeout", "0.5"]
        options = ["--isolation", "sandbox", "--workers", "1", "--limit", "1", "--json"]
        done = run_osmosis("test", *model, *options, cwd=root)
    assert done.json["results"][0]["error"] == "timeout: user code held the event loop for 6 s (while running spin)"


def test_the_network_is_there_if_asked_for(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main=RUNNING, rows=[{"system_prompt": "s", "user_prompt": "u"}])
    connect = "import socket\nprint(socket.create_connection(('127.0.0.1', PORT)).getpeername()[0])"

    def script(request: Request) -> Reply:
        port = at.url.split(":")[2].split("/")[0]
        return text("done") if request.turn else tool_call("run", code=connect.replace("PORT", port))

    with ScriptedEndpoint(script).run_in_thread() as at:
        options = ["--isolation", "sandbox", "--sandbox-network", "--workers", "1"]
        run_osmosis("test", "--base-url", at.url, "--model", "scripted", *options, cwd=root)
        (end,) = [request.messages for request in at.requests if request.turn == 1]
    assert end[-1]["content"].strip() == "127.0.0.1"


def test_a_run_goes_on_in_sandboxes(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main=ADDING)
    options = ["--model", "offline/oracle", "--isolation", "sandbox", "--workers", "1"]
    (root / "mcp" / "main.py").write_text(ADDING.replace("import FastMCP", "import Gone"), encoding="utf-8")
    broken = run_osmosis("test", *options, cwd=root)
    assert (broken.code, "mcp/main.py:2: ImportError" in broken.stderr) == (2, True), broken.stderr
    (root / "mcp" / "main.py").write_text(ADDING, encoding="utf-8")
    assert run_osmosis("eval", *options, "--limit", "1", "--eval-fn", "exact", cwd=root).code == 0
    stepped = run_osmosis("test", *options, "-i", cwd=root, typed='call add {"a": 4, "b": 5}\nc\nq\n')
    assert re.search(r"^── result of add, called by hand, .*\n9$", stepped.stdout, re.MULTILINE), stepped


LOOKING = """
import os

from osmosis_ai import osmosis_reward


@osmosis_reward
def exact(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return float(os.path.exists(".osmosis")) + ADDED
"""


def test_scores_of_a_run_in_sandboxes_are_repeated_in_sandboxes(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", rewards=LOOKING.replace("ADDED", "0.0"))
    options = ["--model", "offline/oracle", "--isolation", "sandbox", "--workers", "1", "--json"]
    done = run_osmosis("test", *options, cwd=root)
    assert [result["reward"] for result in done.json["results"]] == [0.0] * 3
    (root / "reward_fn" / "rewards.py").write_text(LOOKING.replace("ADDED", "0.5"), encoding="utf-8")
    again = run_osmosis("runs", "rescore", "--workers", "1", "--json", cwd=root)
    assert again.json["functions"]["reward_fn.rewards:exact"]["mean"] == 0.5, again


@pytest.mark.in_process
def test_a_saved_tool_is_loaded_into_new_sandboxes(tmp_path: Path) -> None:
    solution = [{"tool": "add", "arguments": {"a": 1, "b": 2}}, "{{result[0]}}"]
    rows = [{"system_prompt": "s", "user_prompt": "u", "ground_truth": "3", "solution": solution}]
    root = write_repo(tmp_path / "repo", rows=rows)
    with running("test", "--watch", "--isolation", "sandbox", "--workers", "1", "--json", cwd=root) as command:
        watch = Watching(command, root, None)
        assert rewards(watch.next()) == [1.0]
        assert rewards(watch.save({"mcp/main.py": ADDING.replace("a + b", "a - b")})) == [0.0]
        assert rewards(watch.save({"mcp/main.py": ADDING})) == [1.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workers", "0"], "--isolation sandbox needs worker processes, and --workers 0 has none"),
        (["--mcp", "mcp.json"], "--isolation sandbox can't hold servers that"),
        (["--rubric", "all"], "would need the judge's key in the sandbox"),
        (["-m", "agent:loop"], "--isolation sandbox is for the tools of the built-in loop"),
    ],
)
def test_what_cannot_be_in_a_sandbox_is_refused(options: list[str], said: str, tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo")
    servers = {"mcpServers": {"own": {"command": "python", "args": ["server.py"]}}}
    (root / "mcp.json").write_text(json.dumps(servers), encoding="utf-8")
    (root / "agent.py").write_text("loop = None\n", encoding="utf-8")
    (root / "reward_rubric").mkdir()
    rubric = (
        "from osmosis_ai import osmosis_rubric\n\n\n@osmosis_rubric\n"
        "def kind(solution_str: str, ground_truth: str | None, extra_info: dict, **kwargs) -> float:\n    return 1.0\n"
    )
    (root / "reward_rubric" / "judged.py").write_text(rubric, encoding="utf-8")
    done = run_osmosis("test", "--model", "offline/oracle", "--isolation", "sandbox", *options, cwd=root)
    assert (done.code, said in done.stderr) == (2, True), done.stderr
