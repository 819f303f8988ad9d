"""Channel options of both ends, in one place so that they agree: message limits, keepalive, reconnection."""

from __future__ import annotations

import grpc
import grpc.aio

from eagle_pangu.serving.settings import ServerSettings

PING_TIMEOUT_MS = 10_000
SHORTEST_PING_INTERVAL_MS = 1_000
FIRST_RECONNECT_MS = 100
LONGEST_RECONNECT_MS = 2_000
CONNECT_MS = 2_000  # gRPC gives one attempt so long: a busy machine takes its time to shake hands

Options = list[tuple[str, int]]


def server_options(settings: ServerSettings) -> Options:
    """Options of a server that permits its clients' pings, also between calls."""
    return [
        *_shared_options(settings),
        ("grpc.so_reuseport", 0),  # a port in use must fail the start, not share the traffic
        ("grpc.http2.min_recv_ping_interval_without_data_ms", SHORTEST_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def channel(target: str, settings: ServerSettings) -> grpc.aio.Channel:
    """An insecure channel with the limits and the keepalive of `settings`; connects at the first call."""
    return grpc.aio.insecure_channel(target, _client_options(settings))


def blocking_channel(target: str, settings: ServerSettings) -> grpc.Channel:
    """The same for calls without an event loop."""
    return grpc.insecure_channel(target, _client_options(settings))


def _client_options(settings: ServerSettings) -> Options:
    return [
        *_shared_options(settings),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", FIRST_RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # despite its name the time of one attempt, not between two
        ("grpc.max_reconnect_backoff_ms", LONGEST_RECONNECT_MS),
        ("grpc.enable_http_proxy", 0),  # services of one cluster never meet through a proxy
    ]


def _shared_options(settings: ServerSettings) -> Options:
    return [
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.keepalive_time_ms", int(settings.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),  # a minute by default, and keepalive pings wait for this one
        ("grpc.keepalive_permit_without_calls", 1),
    ]
