"""Configuration: reads the YAML file, checks all of it, and says what to mend where."""

from proxy.config.endpoints import NODE_ID, HostPort, PortRange
from proxy.config.errors import BadValueError, ConfigError, ConfigProblem
from proxy.config.fields import DEFAULT
from proxy.config.load import load_config
from proxy.config.models import (
    Admin,
    Cluster,
    ClusterSasl,
    ClusterTls,
    Config,
    Limits,
    Listener,
    ListenerTls,
    QuotaRule,
    Quotas,
    State,
    Throttle,
)
from proxy.config.pipelines import Pipeline
from proxy.config.queries import GAINS, AdaptiveBound, Query
from proxy.config.units import Seconds, format_duration, format_size, parse_duration, parse_size

__all__ = [
    "DEFAULT",
    "GAINS",
    "NODE_ID",
    "AdaptiveBound",
    "Admin",
    "BadValueError",
    "Cluster",
    "ClusterSasl",
    "ClusterTls",
    "Config",
    "ConfigError",
    "ConfigProblem",
    "HostPort",
    "Limits",
    "Listener",
    "ListenerTls",
    "Pipeline",
    "PortRange",
    "Query",
    "QuotaRule",
    "Quotas",
    "Seconds",
    "State",
    "Throttle",
    "format_duration",
    "format_size",
    "load_config",
    "parse_duration",
    "parse_size",
]
