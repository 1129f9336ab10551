"""Models that would produce wrong tokens are refused."""

import pytest

from crossdock.workers.model.load import wrap_module
from tests.workers.architectures import REFUSED, build


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_architecture_is_refused_with_reason(name: str) -> None:
    options, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        wrap_module(build(name, options))
