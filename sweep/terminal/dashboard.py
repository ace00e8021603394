"""`sweep dashboard`: Optuna's dashboard of a study, served to this machine alone and read-only."""

from __future__ import annotations

import json
import threading
import warnings
import webbrowser
from collections.abc import Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from qlora_sweep.search_spaces.errors import EnvironmentFault, install_extra
from qlora_sweep.storage.reading import count_trials, shown_storage
from qlora_sweep.sweep.paths import storage_url
from qlora_sweep.sweep.terminal.console import note, say

LOOPBACK = "127.0.0.1"
_NAMES = frozenset({LOOPBACK, "localhost"})


def dashboard(study: str, *, storage: str | None, port: int, is_opened: bool) -> None:
    """Serve a study until somebody interrupts; print where it is.

    Raises:
        EnvironmentFault: the dashboard is not installed, or the port is taken.
    """
    url = storage_url(storage)
    count_trials(study, url=url)
    try:
        from optuna_dashboard import wsgi
    except ImportError as error:
        advice = install_extra("dashboard")
        raise EnvironmentFault(f"Optuna's dashboard is not installed: {advice}") from error
    with shown_storage(study, url=url) as shown:
        number = shown.get_study_id_from_name(study)
        application = only_to_look_at(wsgi(shown))
        try:
            server = make_server(LOOPBACK, port, application, handler_class=_Quiet)
        except OSError as error:
            reason = f"{error.strerror}: choose another with --port"
            raise EnvironmentFault(f"port {port}: {reason}") from error
        with server, warnings.catch_warnings():
            # Of few trials, how little they say: it is drawn as well.
            warnings.simplefilter("ignore")
            address = f"http://{LOOPBACK}:{server.server_port}/dashboard/studies/{number}"
            say(address)
            note("Ctrl-C stops it. It shows the study while that runs, and changes nothing.")
            if is_opened:
                webbrowser.open(address)
            # In a thread, as a signal is heard in the main one alone: it never ends up in a
            # request, whose errors the server takes for the request's.
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            try:
                thread.start()
                thread.join()
            except KeyboardInterrupt:
                note("")
                server.shutdown()


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
