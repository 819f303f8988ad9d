"""A worker over a batcher that doubles numbers."""

import pytest

from eagle_pangu.serving.batch_worker import BatchWorker
from tests.serving.doubler import Doubler


@pytest.fixture
def batcher() -> Doubler:
    return Doubler()


@pytest.fixture
async def worker(batcher):
    worker = BatchWorker("model", batcher)
    yield worker
    await worker.close()
