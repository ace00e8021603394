"""Owns Optuna's dashboard of a study: served to this machine alone, and only to be looked at.

Knows nothing of how a study is stored.
"""

from __future__ import annotations

import json
import threading
import warnings
import webbrowser
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from optuna.storages import BaseStorage

from search_spaces.errors import EnvironmentFault, install_extra
from storage.reading import count_trials
from storage.shown import shown_storage
from sweep.paths import storage_url
from sweep.terminal.console import note, say

DONE = 0
LOOPBACK = "127.0.0.1"
_NAMES = frozenset({LOOPBACK, "localhost"})


def dashboard(study: str, *, storage: str | None, port: int, is_opened: bool) -> int:
    """Serve a study until somebody interrupts; print where it is."""
    url = storage_url(storage)
    count_trials(study, url=url)
    application = _dashboard_of()
    with shown_storage(study, url=url) as shown:
        number = shown.get_study_id_from_name(study)
        try:
            server = make_server(
                LOOPBACK, port, only_to_look_at(application(shown)), handler_class=_Quiet
            )
        except OSError as error:
            raise EnvironmentFault(
                f"port {port}: {error.strerror}: choose another with --port"
            ) from error
        with server:
            address = f"http://{LOOPBACK}:{server.server_port}/dashboard/studies/{number}"
            say(address)
            note("Ctrl-C ends it. It shows the study as it goes on, and changes nothing.")
            if is_opened:
                webbrowser.open(address)
            _serve(server)
    return DONE


def _serve(server: WSGIServer) -> None:
    """Serve until somebody asks to stop.

    In a thread, as a signal is heard in the main one alone: it never ends up in a request, whose
    errors the server takes for the request's.
    """
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    try:
        with warnings.catch_warnings():
            # Of few trials, how little they say: it is drawn as well.
            warnings.simplefilter("ignore")
            thread.start()
            thread.join()
    except KeyboardInterrupt:
        # How a person ends what has no other end.
        note("")
        server.shutdown()


def _dashboard_of() -> Callable[[BaseStorage], WSGIApplication]:
    """Return what makes the dashboard of a storage.

    Raises:
        EnvironmentFault: it is not installed.
    """
    try:
        from optuna_dashboard import wsgi
    except ImportError as error:
        raise EnvironmentFault(
            f"Optuna's dashboard is not installed: {install_extra('dashboard')}"
        ) from error
    made: Callable[[BaseStorage], WSGIApplication] = wsgi
    return made


def only_to_look_at(application: WSGIApplication) -> WSGIApplication:
    """Return an application that refuses whatever would change something.

    So it does what was meant for another host: a page of the web that points a name of its own at
    this machine would else read along.
    """

    def guarded(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        host = str(environ.get("HTTP_HOST", "")).partition(":")[0]
        if environ["REQUEST_METHOD"] in ("GET", "HEAD") and host in _NAMES:
            return application(environ, start)
        start("403 Forbidden", [("Content-Type", "application/json")])
        return [json.dumps({"reason": "sweep only shows this study"}).encode()]

    return guarded


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing: a request every few seconds is no news."""
