import pytest

pytest.register_assert_rewrite("farcall.testing.conformance")
