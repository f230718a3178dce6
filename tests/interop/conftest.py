"""What fails in a program of interop/ is told as well as what fails in a test."""

import pytest

pytest.register_assert_rewrite("interop")
