"""Replicas of the example service on Ray Serve: each has its own runner, HTTP side and batching.

    PYTHONPATH=examples serve run ray_serve.app:app generate="model=smollm2 compiler=eager"

Arguments are fields of `service.app.Settings`.
"""

from __future__ import annotations

from fastapi import FastAPI
from ray import serve
from service.app import Service, Settings, app_of


@serve.deployment(
    ray_actor_options={"num_cpus": 1, "num_gpus": 1},
    # Requests of one replica: those in slots, and a few that wait for one. Ray holds the others.
    max_ongoing_requests=96,
    autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 48},
    health_check_period_s=2,
    # A replica that is replaced answers what it has taken; then its runner is closed.
    graceful_shutdown_timeout_s=60,
)
@serve.ingress()
class Replica:
    """One process of the service, with a GPU of its own.

    Args:
        settings: of the service; its runners are built, or start warm, before Ray sends requests.
    """

    def __init__(self, settings: Settings) -> None:
        self._service = Service(settings)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP side; Ray calls this."""
        return app_of(self._service)

    def check_health(self) -> None:
        """Raise what the last step raised; Ray replaces a replica that does not recover."""
        for front in self._service.fronts().values():
            if front.error is not None:
                raise front.error


def app(args: dict[str, str]) -> serve.Application:
    """Return the application, for `serve run` and `serve deploy`."""
    return Replica.bind(Settings.from_words(args))
