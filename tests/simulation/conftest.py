import pytest


@pytest.fixture(scope="session")
def seeds(pytestconfig: pytest.Config) -> int:
    value = pytestconfig.getoption("--seeds")
    assert isinstance(value, int)
    return value
