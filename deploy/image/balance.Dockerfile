FROM scratch
COPY balance /balance
USER 65532:65532
ENTRYPOINT ["/balance"]
