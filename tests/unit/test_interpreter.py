"""The tests' own interpreter of Triton: what goes wrong in a program is said, and does not reach the next one."""

from __future__ import annotations

import os

import pytest

from tests.interpreter import Interpreter

ALIVE = "import json, os; print(json.dumps([os.getpid(), os.environ['TRITON_INTERPRET'], 'left' in globals()]))"


def test_a_program_that_fails_is_named_and_the_next_one_runs() -> None:
    interpreter = Interpreter()
    try:
        first, interprets, _ = interpreter.run(f"left = 1\n{ALIVE}")
        assert first != os.getpid() and interprets == "1"
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            interpreter.run("1 / 0")
        assert interpreter.run(ALIVE) == [first, "1", False]
        with pytest.raises(AssertionError, match="took more than 0.1 s"):
            interpreter.run("import time; time.sleep(60)", timeout=0.1)
        second = interpreter.run(ALIVE)[0]
        with pytest.raises(AssertionError, match="exit code 3"):
            interpreter.run("import os; os._exit(3)")
        assert len({first, second, interpreter.run(ALIVE)[0]}) == 3
    finally:
        interpreter.close()
