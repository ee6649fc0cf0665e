"""The emulator of Google Cloud Storage, with `moveTo`, which gcsfs renames objects by and the emulator does not have."""

import re
import sys
from typing import Any

from gcp_storage_emulator import server  # type: ignore[import-not-found]
from gcp_storage_emulator.handlers import objects  # type: ignore[import-not-found]


def move(request: Any, response: Any, storage: Any, *arguments: Any, **named: Any) -> None:
    """Renames an object within its bucket."""
    request.params["dest_bucket_name"] = request.params["bucket_name"]
    objects.copy(request, response, storage)
    objects.delete(request, response, storage)


PATH = r"/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.*[^/]+)/moveTo/o/(?P<dest_object_id>.*[^/]+)$"

if __name__ == "__main__":
    server.HANDLERS = (("^" + re.escape(server.settings.API_ENDPOINT) + PATH, {"POST": move}), *server.HANDLERS)
    server.create_server("127.0.0.1", int(sys.argv[1]), in_memory=True).run()
