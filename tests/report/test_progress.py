"""What a person sees of a stage while it runs, on a terminal and elsewhere."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.report.progress import chatter_to

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys, time
from tasks.report import progress
progress.PLAIN_LINE_SECONDS = 0.0
with progress.stage_progress("generate", 4) as update:
    for done in range(5):
        update(done, f"{done} groups ready")
        time.sleep(0.3)
"""


def shown(terminal: bool, **environment) -> str:
    reader, writer = pty.openpty() if terminal else os.pipe()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", **environment}
    if not environment.get("CI"):
        environment.pop("CI", None)
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, stdout=writer)
    os.close(writer)
    text = b""
    while True:
        try:
            part = os.read(reader, 65536)
        except OSError:  # a terminal whose other end is closed
            break
        if not part:
            break
        text += part
    os.close(reader)
    assert process.wait() == 0
    return text.decode()


def test_a_terminal_shows_one_live_bar_that_vanishes():
    text = shown(terminal=True, CI="")
    assert "groups ready" in text
    assert "\x1b[2K" in text  # the line is drawn over
    assert "generate: " not in text


@pytest.mark.parametrize(("terminal", "ci"), [(False, ""), (True, "true")])
def test_elsewhere_and_in_ci_plain_lines_come(terminal, ci):
    lines = shown(terminal, CI=ci).split("\n")
    assert lines[0].strip() == "generate: 0 of 4, 0 groups ready"
    assert not any("\x1b" in line for line in lines)


CHATTER = """
import os, subprocess, sys
from pathlib import Path
from tasks.report.progress import chatter_to, say
with chatter_to(Path(sys.argv[1])):
    print("from Python", file=sys.stderr)
    os.write(2, b"from native code\\n")
    subprocess.run(["sh", "-c", "echo from a child >&2"], check=True)
    say("results")
"""


def test_libraries_write_to_the_log_and_never_to_the_screen(tmp_path):
    log = tmp_path / "run" / "libraries.log"
    process = subprocess.run([sys.executable, "-c", CHATTER, log], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (process.stdout, process.stderr) == ("results\n", "")
    assert log.read_text().splitlines() == ["from Python", "from native code", "from a child"]


def test_a_failing_stage_says_where_the_log_is(tmp_path, capfd):
    log = tmp_path / "libraries.log"
    with pytest.raises(ValueError, match="broken"), chatter_to(log):
        raise ValueError("broken")
    assert str(log) in capfd.readouterr().out
