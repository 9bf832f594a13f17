"""Configuration: reads the YAML file, checks all of it, and says what to mend where."""

from proxy.config.endpoints import NODE_ID, HostPort, PortRange
from proxy.config.fields import DEFAULT
from proxy.config.load import load_config
from proxy.config.models import (
    AdminSection,
    ClusterSasl,
    ClusterSection,
    ClusterTls,
    Config,
    LimitsSection,
    ListenerSection,
    ListenerTls,
    QuotasSection,
    RuleSection,
    StateSection,
    ThrottleSection,
)
from proxy.config.pipeline_models import PipelineSection
from proxy.config.problems import BadValueError, ConfigError, ConfigProblem
from proxy.config.query_models import GAINS, AdaptiveSection, QuerySection
from proxy.config.units import Seconds, format_duration, format_size, parse_duration, parse_size

__all__ = [
    "DEFAULT",
    "GAINS",
    "NODE_ID",
    "AdaptiveSection",
    "AdminSection",
    "BadValueError",
    "ClusterSasl",
    "ClusterSection",
    "ClusterTls",
    "Config",
    "ConfigError",
    "ConfigProblem",
    "HostPort",
    "LimitsSection",
    "ListenerSection",
    "ListenerTls",
    "PipelineSection",
    "PortRange",
    "QuerySection",
    "QuotasSection",
    "RuleSection",
    "Seconds",
    "StateSection",
    "ThrottleSection",
    "format_duration",
    "format_size",
    "load_config",
    "parse_duration",
    "parse_size",
]
