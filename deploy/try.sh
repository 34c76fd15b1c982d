#!/usr/bin/env bash
# Brings the Compose stack up with images built here, appends to it while the leader of the log, an
# appender, a projector and the network of a NATS server are taken away, checks that nothing that was
# acknowledged is lost, and takes the stack down again. It is skipped where there is no engine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

docker info >/dev/null 2>&1 || { echo "skipped: no Docker engine answers (Debian: apt-get install docker.io docker-compose; dockerd &)"; exit 0; }
if docker compose version >/dev/null 2>&1; then compose=(docker compose); elif command -v docker-compose >/dev/null; then compose=(docker-compose); else
	echo "skipped: neither docker compose nor docker-compose is there"; exit 0; fi
export NATS_IMAGE=palimpsest/nats APPENDER_PORT=${APPENDER_PORT:-18080} PROJECTOR_PORT=${PROJECTOR_PORT:-18081}
A=http://127.0.0.1:$APPENDER_PORT P=http://127.0.0.1:$PROJECTOR_PORT
compose+=(-p palimpsest-try -f compose.yaml)
tmp=$(mktemp -d)
load=
cleanup() {
	[ -z "$load" ] || kill "$load" 2>/dev/null || true
	"${compose[@]}" down -v --remove-orphans >/dev/null 2>&1 || true
	rm -rf "$tmp"
}
trap cleanup EXIT
container() { docker ps -aq --filter label=com.docker.compose.project=palimpsest-try --filter "label=com.docker.compose.service=$1" | head -1; }
until_ok() { for _ in $(seq 120); do "$@" >/dev/null 2>&1 && return; sleep 1; done; echo "waited two minutes for: $*"; exit 1; }

"${compose[@]}" up -d >/dev/null 2>&1
until_ok curl -sf $A/readyz
until_ok curl -sf $P/readyz
echo "up"

# One agent that appends, and repeats what it got no answer to. The number of acknowledged events is in a file.
append() {
	local n=0
	while [ ! -e "$tmp/stop" ]; do
		curl -sf --max-time 40 -o "$tmp/answer" "$A/v1/sessions/try/events?expectedSeq=$n" -H 'Content-Type: application/json' \
			-d '{"type":"user/message","surfaceOp":"append","data":{"id":"m'$n'","role":"user","content":[{"type":"text","text":"'$n'"}],"source":{"kind":"user"}}}' || { sleep 0.3; continue; }
		grep -q "\"firstSeq\":$n," "$tmp/answer" || { echo "seq $n: $(cat "$tmp/answer")" >"$tmp/wrong"; return; }
		n=$((n + 1))
		echo $n >"$tmp/acked.new" && mv "$tmp/acked.new" "$tmp/acked" # never half written
	done
}
append &
load=$!
progress() { # waits until more was acknowledged than before
	local before
	before=$(cat "$tmp/acked" 2>/dev/null || echo 0)
	for _ in $(seq 90); do
		[ ! -e "$tmp/wrong" ] || { cat "$tmp/wrong"; exit 1; }
		[ "$(cat "$tmp/acked" 2>/dev/null || echo 0)" -gt $((before + 20)) ] && return
		sleep 1
	done
	echo "appends stand still at $before"
	exit 1
}
progress
leader=nats-1
for n in 1 2 3; do
	if docker logs "$(container nats-$n)" 2>&1 | grep -q "new stream leader for '.G > SESSIONS'"; then leader=nats-$n; fi
done
echo "kill the leader of the log ($leader)"
docker kill "$(container $leader)" >/dev/null
progress
docker start "$(container $leader)" >/dev/null
echo "kill an appender"
victim=$(container appender)
docker kill "$victim" >/dev/null
progress
docker start "$victim" >/dev/null
echo "kill a projector, scale to 1 and back to 3"
docker kill "$(container projector)" >/dev/null
"${compose[@]}" up -d --no-recreate --scale projector=1 >/dev/null 2>&1
progress
"${compose[@]}" up -d --no-recreate --scale projector=3 >/dev/null 2>&1
echo "cut nats-3 off for 20 s"
docker network disconnect palimpsest-try_palimpsest "$(container nats-3)"
sleep 20
docker network connect --alias nats-3 palimpsest-try_palimpsest "$(container nats-3)"
progress
touch "$tmp/stop"
wait "$load" || true
load=
acked=$(cat "$tmp/acked")
until_ok curl -sf "$P/v1/sessions/try/messages?minSeq=$((acked - 1))"
report=$(curl -sf "$P/v1/sessions/try/verify")
echo "$acked events acknowledged; verify: $report"
grep -q "\"lastSeq\":$((acked - 1))," <<<"$report" && grep -q '"findings":\[\]' <<<"$report" || { echo "FAILED"; exit 1; }
echo "nothing is lost"
