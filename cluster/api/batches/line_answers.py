"""Answers the lines of batches as if their owners had sent them, in the least urgent class."""

from crossdock.cluster.api.batches.folder import Owner
from crossdock.cluster.api.batches.lines import Line, answered
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.keys import KeyRing
from crossdock.cluster.api.http.limits import Charge, Ledger
from crossdock.cluster.api.http.own_requests import own_request
from crossdock.cluster.api.http.payers import Payers
from crossdock.cluster.api.routes.model_routes import Creates
from crossdock.workers.schedule.shares import Shares


class LineAnswers:
    """The endpoints, as lines reach them. The limits of a line's API key hold."""

    def __init__(
        self, creates: Creates, keys: KeyRing, ledger: Ledger, payers: Payers, shares: Shares, slo_class: str
    ) -> None:
        self._creates = creates
        self._payers = payers
        self._keys = keys
        self._ledger = ledger
        self._shares = shares
        self._slo_class = slo_class

    async def __call__(self, line: Line, owner: Owner, request_id: str) -> tuple[int, bytes]:
        """Return the status and the body for a line. Raises ApiError 429 or 503, after which it may be tried again."""
        key = self._keys.of_tenant(owner.tenant) if owner.tenant else None
        if owner.tenant and key is None:
            error = ApiError("The API key of this batch is no longer valid.", status=401, code="invalid_api_key")
            return error.status, error.body()
        charge = None if key is None else Charge(self._ledger.account(key))
        payer = self._payers.named(key, owner.payer)
        request = own_request(request_id, self._shares, slo_class=self._slo_class, key=key, account=charge, payer=payer)
        try:
            if charge is not None:
                await charge.begin(is_read=False)
            request.state.memory.hold(line.num_bytes)
            return await answered(line, self._creates[line.url], request)
        finally:
            request.state.memory.release()
            if charge is not None:
                charge.end()
