"""`quire embed`: turns texts into embeddings."""

import json
import sys
from collections.abc import Sequence

from quire.cli.settings import EmbedSettings
from quire.cli.target import connection_errors, find_target, open_client
from rpc.settings import parse_settings


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(EmbedSettings, "quire embed", argv)
    texts = sys.stdin.read().splitlines() if settings.texts == ("-",) else settings.texts
    target = find_target(settings)
    with connection_errors(target), open_client(target, settings) as client:
        embeddings = client.embed(
            texts,
            model=settings.served_model_name,
            pooling=settings.pooling,
            normalize=settings.normalize,
            dimensions=settings.dimensions,
        )
    for vector in embeddings.vectors:
        print(json.dumps([round(number, 7) for number in vector.tolist()]))
    return 0
