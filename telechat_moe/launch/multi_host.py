"""Run a job on several hosts: start an agent on each through a remote shell, and watch the agents.

The launcher talks with an agent through its standard input and output, so that nothing depends on how soon a shared
file system shows a file; when a connection ends, the agent ends its processes
(:mod:`telechat_moe.launch.host_agent`). Signs of life of the processes themselves are files that the agent on the same
host reads.
"""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from telechat_moe import processes
from telechat_moe.interruption import can_stop
from telechat_moe.launch.commands import SSH, LaunchNode, remote
from telechat_moe.launch.host_processes import LAST_LINES, PATIENCE_S, POLL_S, LogTail
from telechat_moe.processes import CONTROL, Control, RankDiedError, RankFailedError

START_S = 60.0  # for a remote shell to start an agent
ANSWER_S = 20.0  # agents speak every second
END_S = 10.0  # for an agent to end its processes


@dataclass
class _Agent:
    node: LaunchNode
    process: subprocess.Popen[str]
    log: Path
    heard: float = field(default_factory=time.monotonic)
    is_up: bool = False
    has_closed: bool = False
    answer: dict[str, Any] | None = None

    def tell(self, message: Any) -> None:
        """Send a message as a line of JSON; an agent that is gone gets none."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def last_lines(self) -> str:
        """Return what the remote shell and the agent said on standard error."""
        lines = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return "\n  ".join(["", *lines]) if lines else " (without a word)"


@dataclass
class MultiHostProcesses:
    """The processes of one job on several hosts.

    Args:
        job, logs: Folders that all hosts see.
        metrics: File whose last line says how far the run is.
        can_stop: See :class:`telechat_moe.launch.host_processes.HostProcesses`.
    """

    job: Path
    nodes: Sequence[LaunchNode]
    logs: Path
    program: Sequence[str]
    metrics: Path
    shell: str = SSH
    out: IO[str] = field(default_factory=lambda: sys.stderr)
    can_stop: bool = True
    silence_s: float = field(default_factory=lambda: processes.SILENCE_S)

    def run(self) -> None:
        """Run to the end.

        Raises:
            RankFailedError: A process or an agent gave up with a message.
            RankDiedError: A process died or hangs, or a host does not answer; all processes are ended.
        """
        self.control = Control(self.job / CONTROL)
        self.tail = LogTail(self.logs / "worker_0.log", self.out)
        self.messages: queue.Queue[tuple[_Agent, dict[str, Any]]] = queue.Queue()
        self.agents: list[_Agent] = []
        try:
            with processes.stop_on_signal(self.control.ask_to_stop if self.can_stop else None):
                self.agents += [self._start(node) for node in self.nodes]
                self._wait_until_up()
                for agent in self.agents:
                    agent.tell("go")
                self._watch()
        finally:
            self._end()
            self.tail.show()

    def _start(self, node: LaunchNode) -> _Agent:
        argv = [sys.executable, "-u", "-m", "telechat_moe.launch.host_agent"]
        command = argv if node.is_here else remote(self.shell, node.host, argv)
        log = self.logs / f"agent_{node.number}.log"
        with log.open("wb") as errors:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            process = processes.start(command, text=True, **pipes)
        agent = _Agent(node, process, log)
        task = {
            "node": asdict(node),
            "nonce": self.control.read("nonce"),
            "silence_s": self.silence_s,
            "program": list(self.program),
            **{k: str(getattr(self, k).absolute()) for k in ("job", "logs", "metrics")},
        }
        agent.tell(task)
        threading.Thread(target=self._listen, args=(agent,), daemon=True).start()
        return agent

    def _listen(self, agent: _Agent) -> None:
        assert agent.process.stdout is not None
        for line in agent.process.stdout:
            try:
                message = json.loads(line)
            except ValueError:  # a remote host's greeting
                continue
            if isinstance(message, dict):
                self.messages.put((agent, message))
        self.messages.put((agent, {"closed": True}))

    def _hear(self) -> None:
        """Take in what the agents said; raise what ends the run."""
        with suppress(queue.Empty):
            while True:
                agent, message = self.messages.get_nowait()
                agent.heard = time.monotonic()
                agent.is_up |= "up" in message
                agent.has_closed |= "closed" in message
                if "said" in message:
                    self.out.write(f"{agent.node.host}: {message['said']}\n")
                if "answer" in message:
                    agent.answer = message["answer"]
        for agent in self.agents:
            code = agent.process.poll()
            # Its answer may come after its end, until the connection is closed.
            if code is not None and agent.has_closed and agent.answer is None:
                text = f"its agent ended with exit code {code}:{agent.last_lines()}"
                agent.answer = {"kind": "lost", "message": f"host {agent.node.host}: {text}"}

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            self._hear()
            self._raise_bad()
            late = [a for a in self.agents if not a.is_up]
            ups = [(a, self.control.read(f"node_{a.node.number}.up")) for a in self.agents]
            unseen = [a for a, up in ups if up is None]
            if not late and not unseen:
                return
            if time.monotonic() > deadline:
                host, reason = (late or unseen)[0].node.host, "its agent did not start"
                if not late:
                    reason = f"what it writes into {self.control.folder} is not seen here; output_dir must be one "
                    reason += "folder that all hosts see"
                raise RankDiedError(f"host {host}: {reason} within {START_S:.0f} s")
            time.sleep(POLL_S)

    def _watch(self) -> None:
        can_stop()
        while True:
            self.tail.show()
            self._hear()
            self._raise_bad()
            if all(a.answer is not None for a in self.agents):
                return
            for agent in self.agents:
                silent = time.monotonic() - agent.heard
                if agent.answer is None and silent > ANSWER_S:
                    ranks = agent.node.ranks
                    raise RankDiedError(
                        f"host {agent.node.host} (ranks {ranks.start} to {ranks.stop - 1}) has not answered for "
                        f"{silent:.0f} s; all processes were ended"
                    )
            time.sleep(POLL_S)

    def _raise_bad(self) -> None:
        """Raise the best explanation there is, once an agent reports an end that is not a good one."""
        if not self._bad():
            return
        deadline = time.monotonic() + PATIENCE_S  # other agents may report the cause
        while time.monotonic() < deadline and self._bad()[0]["kind"] != "failed":
            self._hear()
            time.sleep(POLL_S)
        answer = self._bad()[0]
        if answer["kind"] == "failed":
            raise RankFailedError(answer["message"], int(answer["exit_code"]))
        raise RankDiedError(answer["message"])

    def _bad(self) -> list[dict[str, Any]]:
        """Return the bad answers, the one that says most first."""
        order = ("failed", "lost", "died", "echo")  # a lost host says more than a death on it
        answers = [a.answer for a in self.agents if a.answer is not None]
        failures = [answer for answer in answers if answer["kind"] != "done"]
        return sorted(failures, key=lambda answer: order.index(answer["kind"]))

    def _end(self) -> None:
        """Let every agent end its processes and go."""
        for agent in self.agents:
            with suppress(OSError):
                assert agent.process.stdin is not None
                agent.process.stdin.close()
        deadline = time.monotonic() + END_S
        for agent in self.agents:
            with suppress(subprocess.TimeoutExpired):
                agent.process.wait(timeout=max(0.1, deadline - time.monotonic()))
            processes.end(agent.process)
