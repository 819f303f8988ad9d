"""The draft service's life: load the drafters, serve, drain, stop. The entry point of its container."""

from __future__ import annotations

import grpc.aio

from draft_service.desk import Desk
from draft_service.drafters.base import Budget, DrafterError
from draft_service.drafters.registry import offered
from draft_service.service import DraftServicer
from draft_service.slots import Slots
from eagle_pangu.serving.bootstrap import StartError, run_service
from eagle_pangu.serving.logs import get_logger
from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.serving.stalls import stall
from protos.v1 import draft_pb2, draft_pb2_grpc

log = get_logger(__name__)


class DraftService:
    """What the bootstrap runs.

    Args:
        settings: the service's section.
    """

    service_names = (draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,)

    def __init__(self, settings: DraftSettings) -> None:
        self._settings = settings
        self._desks: dict[str, Desk] = {}
        self._slots = Slots(settings.slots)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        settings = self._settings
        default = "" if settings.drafter == "none" else settings.drafter
        most = Budget(settings.max_rows, settings.max_depth)
        servicer = DraftServicer(self._desks, default, self._slots, most, settings.session_idle_seconds)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)

    async def start(self) -> None:
        """Load every drafter that the settings allow, each on its own thread.

        Raises:
            StartError: a drafter cannot be loaded.
        """
        settings = self._settings
        names = offered(settings)
        for name in names:
            desk = Desk(name)
            try:
                await desk.load(settings)
            except DrafterError as error:
                await desk.close()
                raise StartError(str(error)) from error
            self._desks[name] = desk
        log.info("drafters loaded", drafters=names, default_drafter=settings.drafter)

    def hindrance(self) -> str | None:
        """A drafter's work that does not come to its end."""
        stalls = (stall(desk.busy_since, self._settings.stall_seconds) for desk in self._desks.values())
        return next(filter(None, stalls), None)

    async def drained(self) -> None:
        """Return once no session runs."""
        await self._slots.idle()

    async def stop(self) -> None:
        """End the threads, once every session has ended."""
        await self._slots.idle()
        for desk in self._desks.values():
            await desk.close()


def main() -> None:
    """Console script `eagle-pangu-draft`."""
    run_service("eagle-pangu-draft", lambda settings: DraftService(settings.draft), "draft")


if __name__ == "__main__":
    main()
