"""Our application among those of a Ray cluster: deployed, asked, and deleted, as long as it is ours."""

import contextlib
import re
import time
from collections.abc import Iterable
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, LoggingConfig

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.serve import shared_cluster
from crossdock.cluster.serve.app import application
from crossdock.cluster.serve.stop_signals import StopRequest

_ANSWER_S = 30.0  # ingresses have so long to answer what the command asks
_NO_ANSWER = TimeoutError, RayError, RayServeException
_TURN_S = 0.5  # between two looks for a signal while requests end
_CREATION_S = 10.0  # until Serve has created the deployments of an application that it was told of
_DELETION_S = 60.0  # after the drain of all requests, until Serve has ended the application's processes
_FRAME = re.compile(r'^\s+File ".*", line \d+', re.MULTILINE)
_USER_ERROR = re.compile(r"^ValueError: (.*)", re.MULTILINE | re.DOTALL)


class Lost(RuntimeError):
    """The application did not start, or is no longer ours; the message gives the reason."""


class Application:
    """One Serve application. Another driver may delete or replace it at any time: then it is left alone."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.name = config.application.name
        self._version = ""  # of the ingress; empty: nothing has been deployed

    def deploy(self) -> None:
        """Hand the application to Serve, which starts it."""
        http = self.config.http
        log = LoggingConfig(enable_access_log=False)
        # No proxy leads to ingresses that listen themselves: their route would be another application's to take.
        route = None if http.direct else self.config.application.route_prefix
        version = shared_cluster.new_version()
        app = application(self.config, version)
        target = serve.RunTarget(app, self.name, route, log, external_scaler_enabled=self.config.is_elastic)
        self._version = version  # from here on, also where the call fails
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def is_up(self) -> bool:
        """Return whether every deployment runs and every ingress has its replicas.

        Raises:
            Lost: at a user error, once Serve has given up, or where the application is gone.
        """
        app = serve.status().applications.get(self.name)
        if app is None:
            raise Lost(self._gone())
        messages = [app.message, *(each.message for each in app.deployments.values())]
        reason = start_reason(messages, has_ended=app.status == ApplicationStatus.DEPLOY_FAILED)
        if reason is not None:
            raise Lost(reason)
        return app.status == ApplicationStatus.RUNNING and self.is_connected()

    def is_connected(self) -> bool:
        """Return whether all ingresses have their replicas: Serve may say that these run before an ingress hears of
        them."""
        try:
            connected = self._ingresses().broadcast("is_connected").results(timeout_s=_ANSWER_S)
        except _NO_ANSWER:
            return False
        return all(connected) and len(connected) >= self.config.http.replicas

    def replicas(self) -> list[dict[str, Any]]:
        """Return the replicas' reports of themselves; empty if they do not answer in time."""
        try:
            described: list[dict[str, Any]] = self._ingresses().replicas.remote().result(timeout_s=_ANSWER_S)
        except _NO_ANSWER:
            return []
        return described

    def require_ours(self) -> None:
        """Raise Lost where another driver has deleted or replaced the application."""
        with contextlib.suppress(*_NO_ANSWER):
            if not self.is_ours():
                raise Lost(self._gone())

    def is_ours(self) -> bool:
        """Return whether Serve runs what this process has deployed. Raises an error of Ray where Serve is silent."""
        deadline = time.monotonic() + _CREATION_S
        while self._version:
            if self._status() in (None, ApplicationStatus.DELETING):
                return False
            version = shared_cluster.version_of(self.name)
            if version is not None or time.monotonic() > deadline:
                return version == self._version
            time.sleep(_TURN_S)  # Serve creates deployments a moment after it has been told of them
        return False

    def drain(self, seconds: float, stop: StopRequest) -> None:
        """Have the ingresses take no further request, and finish running ones in `seconds`, or until that is urgent."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(*_NO_ANSWER):  # an ingress was lost: its requests are gone
            is_drained = False
            while not is_drained:
                left = 0.0 if stop.is_urgent else max(0.0, deadline - time.monotonic())
                drained = self._ingresses().broadcast("drain", min(left, _TURN_S)).results(timeout_s=_ANSWER_S)
                is_drained = all(drained) or not left

    def delete(self, stop: StopRequest) -> None:
        """Delete the application if it is still ours, and wait until it is gone. Serve drains requests of its proxies.

        A stop that is urgent ends these requests. One that becomes urgent later ends the wait: Serve goes on alone.

        Raises:
            Lost: Serve does not answer, or the application is still there; the message says how to remove it.
        """
        try:
            if not self.is_ours():
                return
            if was_urgent := stop.is_urgent:
                with contextlib.suppress(*_NO_ANSWER):
                    self._ingresses().broadcast("end").results(timeout_s=_ANSWER_S)
            serve.delete(self.name, _blocking=False)
            deadline = time.monotonic() + self.config.http.drain_timeout_s + _DELETION_S
            has_begun = False
            while (status := self._status()) is not None and (was_urgent or not stop.is_urgent):
                if has_begun and status != ApplicationStatus.DELETING:
                    break  # it is gone, and another user has deployed one of this name
                has_begun = status == ApplicationStatus.DELETING
                if has_begun:
                    shared_cluster.end_unplaced_actors(self.name)  # Serve would wait for these to drain
                if time.monotonic() > deadline:
                    raise TimeoutError("it is still being deleted")
                time.sleep(_TURN_S)
        except _NO_ANSWER as error:
            reason = str(error) or type(error).__name__
            raise Lost(
                f"application {self.name!r} may still run: {reason}. Remove it: {shared_cluster.removal(self.name)}"
            ) from None

    def _status(self) -> ApplicationStatus | None:
        """Return Serve's status of the application with this name; None: there is none."""
        app = shared_cluster.details()["applications"].get(self.name)
        return None if app is None else app["status"]

    def _ingresses(self) -> Any:
        return serve.get_app_handle(self.name)

    def _gone(self) -> str:
        return f"application {self.name!r} has been deleted or replaced by another user of the Ray cluster"


def start_reason(messages: Iterable[str], *, has_ended: bool) -> str | None:
    """Return the reason in Serve's messages about the application and its deployments; None: the start may go on.

    A user error is a ValueError, whose message says all: every further try of Serve would raise it again. Where there
    is none, the messages and tracebacks are kept. `has_ended`: Serve has given up.
    """
    texts = [text for message in messages if (text := message.strip())]
    errors = [error for text in texts if (error := _user_error(text)) is not None]
    return "\n".join(dict.fromkeys(errors or texts)) if errors or has_ended else None


def _user_error(text: str) -> str | None:
    """Return the message of the ValueError that ends a traceback; None for another error, or no traceback."""
    frames = list(_FRAME.finditer(text))
    error = _USER_ERROR.search(text, frames[-1].end()) if frames else None
    return None if error is None else error[1].strip()
