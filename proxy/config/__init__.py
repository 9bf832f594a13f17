"""Configuration: reads the YAML file, checks all of it, and says what to mend where."""

from proxy.config.document import ConfigError
from proxy.config.load import load_config
from proxy.config.models import Config, ListenerSection

__all__ = ["Config", "ConfigError", "ListenerSection", "load_config"]
