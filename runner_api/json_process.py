"""A program that answers JSON lines: one request a line on its stdin, one answer a line on its stdout.

Whatever goes wrong there (it cannot be started, dies, hangs, prints something else) is one error that says what was
asked, what came, and what the program last wrote to stderr. A program that broke the protocol once is ended: what it
would say next could be the answer to anything. Needs POSIX pipes.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import select
import shlex
import subprocess
import threading
import time
import weakref
from typing import IO, Any

from runner_api.errors import ConfigError, RunnerError
from runner_api.wire import error_from_json

# How much of stderr is remembered, and how much of a line.
STDERR_LINES, LINE_LENGTH = 12, 300
LONGEST_ANSWER = 1 << 30
log = logging.getLogger("modelrunner")


class JsonProcess:
    """One running program. timeout: seconds that one answer may take.

    Raises ConfigError if the program cannot be started.
    """

    def __init__(self, command: str, timeout: float) -> None:
        self.command, self.timeout = command, timeout
        try:
            words = shlex.split(command)
        except ValueError as e:
            raise ConfigError(
                f"not a command line: {e}", field="runner", got=command, expected="words as a shell reads them"
            ) from e
        if not words:
            raise ConfigError("no program is named", field="runner", got=command, expected="process:COMMAND LINE")
        pipe = subprocess.PIPE
        try:
            self._popen = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
        except OSError as e:
            raise ConfigError(
                f"the program cannot be started: {e}", field="runner", got=command, expected="process:COMMAND LINE"
            ) from e
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._in, self._out = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        os.set_blocking(self._in, False)
        self._serial, self._said, self._lock = 0, bytearray(), threading.Lock()
        self._stderr: collections.deque[str] = collections.deque(maxlen=STDERR_LINES)
        self._listener = threading.Thread(target=_listen, args=(self._popen.stderr, self._stderr), daemon=True)
        self._listener.start()
        self._end = weakref.finalize(self, _end, self._popen)  # also when this process exits

    @property
    def alive(self) -> bool:
        return self._end.alive and self._popen.poll() is None

    def ask(self, op: str, **fields: Any) -> Any:
        """Send one request and wait for its answer: what stands under "ok".

        Raises the RunnerError that the program answered with; a RunnerError of our own for an error of any other type,
        for an answer that breaks the protocol, and for none.
        """
        with self._lock:
            if not self._end.alive:
                raise RunnerError(
                    f"the program was ended before {op!r} was asked", field="process", got=self.command,
                    hint="Build the runner again: that starts the program anew",
                )  # fmt: skip
            self._serial += 1
            request = json.dumps({"id": self._serial, "op": op, **fields}, allow_nan=False, separators=(",", ":"))
            answer = self._parse(op, self._exchange(op, request.encode() + b"\n"))
        if "ok" in answer:
            return answer["ok"]
        raise self._refusal(op, answer["error"])

    def close(self) -> None:
        """End the program, kindly if it listens. May be called again."""
        self._end()

    # -- one exchange -----------------------------------------------------------------------------------------

    def _exchange(self, op: str, request: bytes) -> bytes:
        """Write the request and read one line, whichever end of the pipes is ready."""
        if self._said:
            self._not_an_answer(op, bytes(self._said))
        deadline = time.monotonic() + self.timeout
        unsent, searched = memoryview(request), 0
        while True:
            end = self._said.find(b"\n", searched)
            if end >= 0:
                line = bytes(self._said[:end])
                del self._said[: end + 1]
                return line
            searched = len(self._said)
            ready = self._wait(bool(unsent), deadline)
            if not ready:
                self._fail(f"no answer to {op!r} within {self.timeout:g} s", "an answer in time", self._half_said())
            try:
                if self._in in ready and unsent:
                    unsent = unsent[os.write(self._in, unsent[: 1 << 16]) :]
            except BlockingIOError:
                pass
            except OSError:  # the program has closed its stdin: what it said last may tell why
                unsent = unsent[:0]
            if self._out in ready:
                chunk = os.read(self._out, 1 << 20)
                if not chunk:
                    self._fail(f"the program ended before it answered {op!r}", "an answer", self._half_said())
                self._said += chunk
                if len(self._said) > LONGEST_ANSWER:
                    self._fail(f"the answer to {op!r} does not end", "a line", self._half_said())

    def _half_said(self) -> str | None:
        """The beginning of a line that has not ended."""
        return self._said[:LINE_LENGTH].decode(errors="replace") or None

    def _wait(self, writing: bool, deadline: float) -> set[int]:
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        if writing:
            poll.register(self._in, select.POLLOUT)
        return {fd for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}

    def _parse(self, op: str, line: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            self._not_an_answer(op, line)
        if answer.get("id") != self._serial:
            self._fail(f"the answer to {op!r} has another id", f"id {self._serial}", answer.get("id"))
        if set(answer) - {"id"} not in ({"ok"}, {"error"}):
            self._fail(f"the answer to {op!r} is neither a result nor an error", "fields id, and ok or error", answer)
        return answer

    def _refusal(self, op: str, data: Any) -> RunnerError:
        try:
            error = error_from_json(data)
        except ConfigError as e:
            return RunnerError(f"the error that answers {op!r} cannot be read: {e}", field="process", got=data)
        if data.get("type") == type(error).__name__:
            if error.field is None:  # nothing says who speaks, and of what
                error.field = f"process:{self.command} {op}"
                error.args = (f"{error.field}: {error}",)
            return error
        time.sleep(0.05)  # its traceback is on the way
        return RunnerError(
            f"the program failed in {op!r}: {data.get('type')}: {data['text']}",
            field="process",
            hint=self._last_words(),
        )

    # -- when it goes wrong -----------------------------------------------------------------------------------

    def _not_an_answer(self, op: str, said: bytes) -> None:
        text = said.decode(errors="replace").strip()
        self._fail(
            f"the program wrote something else to stdout when asked {op!r}", "one JSON object a line",
            text[:LINE_LENGTH], "Print to stderr; stdout carries answers alone",
        )  # fmt: skip

    def _fail(self, what: str, expected: str, got: Any = None, hint: str = "") -> None:
        """End the program and raise."""
        try:
            code: int | None = self._popen.wait(0.2)
        except subprocess.TimeoutExpired:
            code = None
        else:
            self._listener.join(1.0)
        self._popen.kill()
        self._end()
        state = "" if code is None else f" (exit code {code})"
        shown = {} if got is None else {"got": got}
        hint = ". ".join(filter(None, [hint, self._last_words()]))
        raise RunnerError(f"{what}{state}", field=f"process:{self.command}", expected=expected, hint=hint, **shown)

    def _last_words(self) -> str:
        said = list(self._stderr)
        return "Its last words on stderr: " + " | ".join(said) if said else "It wrote nothing to stderr"


def _listen(stream: IO[bytes], said: collections.deque[str]) -> None:
    with stream:
        while line := stream.readline(4096):
            text = line.decode(errors="replace").rstrip()
            if text.strip(" ^~"):  # the marks below a traceback's lines say nothing here
                said.append(text[:LINE_LENGTH])
                log.debug("%s", text)


def _end(popen: subprocess.Popen[bytes]) -> None:
    """Its stdin ends, which ends a program that reads lines; one that does not listen is killed."""
    for stream in (popen.stdin, popen.stdout):
        if stream is not None:
            stream.close()
    try:
        popen.wait(1.0)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
