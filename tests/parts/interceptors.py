"""Interceptors for the relay's tests."""


class AllShown:
    """An interceptor of every request; subclasses say what it makes of each."""

    def wants(self, _api_key, _now_ms):
        return True

    def gated(self, _start_ms, _now_ms):
        pass

    def close(self):
        pass


class NothingShown(AllShown):
    """An interceptor of no request."""

    def wants(self, _api_key, _now_ms):
        return False
