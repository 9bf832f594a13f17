# The proxy alone, without what the demo and the tests need, in the versions of the lock file.
FROM python:3.11-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY metrics metrics
COPY proxy proxy
RUN python -m venv /opt/quota-proxy
# As constraints the lock file's lines set versions and ask for nothing more. Its hashes are left
# out: pip wants one for every requirement then, and this directory can have none.
RUN sed -E '/^ +--hash/d; s/ *\\$//' requirements.lock > constraints.txt \
    && /opt/quota-proxy/bin/pip install --constraint constraints.txt . \
    && /opt/quota-proxy/bin/pip uninstall --yes pip setuptools

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="Kafka Quota Proxy" org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/quota-proxy/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY --from=build /opt/quota-proxy /opt/quota-proxy
# The user that the chart runs as; the state's directory is where its volume goes.
RUN install -d -o 65532 -g 65532 /var/lib/quota-proxy
USER 65532:65532
WORKDIR /var/lib/quota-proxy
EXPOSE 9644 19092
STOPSIGNAL SIGTERM
ENTRYPOINT ["quota-proxy"]
CMD ["run", "-c", "/etc/quota-proxy/config/quota-proxy.yaml"]
