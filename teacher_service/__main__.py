"""Entry point of the container and of `eagle-pangu up`."""

from __future__ import annotations

from eagle_pangu.serving.bootstrap import Service, run_service
from eagle_pangu.serving.settings import Settings


def main() -> None:
    """Console script `eagle-pangu-teacher`."""
    run_service("eagle-pangu-teacher", _build, "teacher")


def _build(settings: Settings) -> Service:
    # Imported only here, where an import of torch that fails is explained.
    from teacher_service.main import TeacherService

    return TeacherService(settings.teacher)


if __name__ == "__main__":
    main()
