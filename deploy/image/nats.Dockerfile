# A nats-server built from its module, for places that reach no registry. The official image
# does as well: NATS_IMAGE in compose.yaml.
FROM scratch
COPY ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --chown=65532:65532 data /data
COPY nats-server /nats-server
USER 65532:65532
EXPOSE 4222 6222 8222
ENTRYPOINT ["/nats-server"]
