"""The response cache ``redis`` for Headrace: the answers of models, in a Redis server that several servers may share.

::

    headrace serve --cache-config=redis,host=localhost --cache-config=redis,port=6379 ...

`RedisParameters` has the settings; they are those of Triton's Redis cache.
"""

from __future__ import annotations

from headrace import ResponseCache, hookimpl
from headrace_redis.redis_cache import RedisCache, RedisParameters

__all__ = ["RedisCache", "RedisParameters"]


@hookimpl
def register_caches() -> list[type[ResponseCache]]:
    return [RedisCache]
