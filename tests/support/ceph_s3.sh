#!/usr/bin/env bash
# A temporary S3 server for tests and benchmarks: one Ceph monitor, one OSD and
# one RADOS gateway on 127.0.0.1. All their files are below one folder;
# DIR/log/radosgw.log names each request of the gateway, and its client.
#
#   ceph_s3.sh up DIR [PORT]   start (PORT: default 8000; 0 picks a free one), wait
#                           until it serves, print the endpoint's URL
#   ceph_s3.sh down DIR        stop the daemons and delete their data; DIR/log stays
#
# Environment of `up`:
#   CEPH_S3_ACCESS_KEY, CEPH_S3_SECRET_KEY   default test-access, test-secret
#   CEPH_S3_ADDRESS  where the gateway listens, default 127.0.0.1
#   CEPH_S3_STORE   bluestore (default: a sparse file, DIR/osd/block) or memstore
#                   (objects in the OSD's memory)
#   CEPH_S3_SIZE    capacity in GiB, default 20. Keep it well above the stored
#                   data: requests to a full server hang instead of failing
#
# Debian 12: apt-get install -y --no-install-recommends \
#                ceph-mon ceph-osd radosgw ceph-common
set -euo pipefail
# The caller's Ceph or Python settings must not leak into the cluster.
unset CEPH_ARGS CEPH_CONF CEPH_KEYRING PYTHONPATH PYTHONHOME
MARK='# Made by ceph_s3.sh; its "down" deletes the files beside this one.'

die() { echo "ceph_s3.sh: $*" >&2; exit 1; }
usage() { sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2; exit 2; }
listening() { (: <>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
answers() (  # does ADDRESS PORT answer an anonymous GET / with 200?
  exec 3<>"/dev/tcp/$1/$2" && printf 'GET / HTTP/1.0\r\n\r\n' >&3 &&
    IFS= read -r -t 5 -u 3 line && [[ $line = *' 200 '* ]]
) 2>/dev/null
free_port() {  # below Linux's ephemeral ports, which outgoing connections use
  local p
  while p=$((20000 + RANDOM % 10000)); listening "$p"; do :; done
  echo "$p"
}
# Run one step of `up` with its output in the log: a daemon must not hold our stdout.
step() {
  timeout 60 "$@" >>"$DIR/log/up.log" 2>&1 ||
    die "failed ($?): $*; the end of its output: $(tail -n 5 "$DIR/log/up.log")"
}

# Is this process one of DIR's daemons? Pids are reused, so compare command lines.
ours() { grep -qzxF -- "$DIR/ceph.conf" "/proc/$1/cmdline" 2>/dev/null; }

down() {
  local daemon pid n
  grep -qsxF "$MARK" "$DIR/ceph.conf" || return 0    # not a folder of this script
  for daemon in radosgw osd mon; do        # clients before their servers
    pid=$(cat "$DIR/run/$daemon.pid" 2>/dev/null) && ours "$pid" || continue
    kill "$pid" || true
    for ((n = 0; n < 100; n++)); do ours "$pid" || continue 2; sleep 0.1; done
    kill -KILL "$pid" || true
  done
  rm -rf "$DIR"/{mon,osd,run}
}

up() {
  local address=${CEPH_S3_ADDRESS:-127.0.0.1}
  local port=$1 store=${CEPH_S3_STORE:-bluestore} size=${CEPH_S3_SIZE:-20}
  local tool missing=() mon fsid uuid conf key pid n
  for tool in ceph ceph-authtool ceph-mon ceph-osd monmaptool radosgw radosgw-admin; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  ((!${#missing[@]})) || die "not installed: ${missing[*]} (Debian: apt-get install -y --no-install-recommends ceph-mon ceph-osd radosgw ceph-common)"
  [[ $port =~ ^[0-9]+$ ]] || die "not a port: $port"
  [[ $store = bluestore || $store = memstore ]] || die "CEPH_S3_STORE is bluestore or memstore, not $store"
  [[ ! -e $DIR/mon ]] || die "$DIR holds a cluster already; first run: ceph_s3.sh down $DIR"
  [[ -z $(ls -A "$DIR" 2>/dev/null) ]] || grep -qsxF "$MARK" "$DIR/ceph.conf" ||
    die "$DIR is not new, not empty and was not made by ceph_s3.sh: choose another folder"
  [[ $port != 0 ]] || port=$(free_port)
  ! listening "$port" || die "port $port is taken"

  mkdir -p "$DIR/log"
  : >"$DIR/log/up.log"
  trap 'down; echo "ceph_s3.sh: not started; logs are in $DIR/log" >&2' EXIT
  trap 'exit 1' INT TERM HUP               # after the running step
  mon=$(free_port)
  fsid=$(cat /proc/sys/kernel/random/uuid)
  uuid=$(cat /proc/sys/kernel/random/uuid)
  cat >"$DIR/ceph.conf" <<CONF
$MARK
[global]
fsid = $fsid
mon host = v2:127.0.0.1:$mon
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr1 = false
keyring = $DIR/keyring
run dir = $DIR/run
crash dir = $DIR/log
log file = $DIR/log/\$type.log
admin socket =
# One copy of everything, on the one OSD.
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
mon allow pool size one = true
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
# Do not shut the monitor down when the disk is nearly full.
mon data avail warn = 0
mon data avail crit = 0
# Start faster: the gateway creates its pools one by one, each with a map change;
# the OSD closes its block file about ten times and waits for one poll each time.
paxos propose interval = 0.01
paxos min wait = 0.01
bdev aio poll ms = 10
bluestore fsck on mkfs = false
[mon]
mon data = $DIR/mon
pid file = $DIR/run/mon.pid
mon cluster log file = $DIR/log/cluster.log
[osd]
osd data = $DIR/osd
osd uuid = $uuid
pid file = $DIR/run/osd.pid
osd objectstore = $store
osd memory target = 1G
bluestore block size = ${size}G
memstore device bytes = ${size}G
# Reuse freed space first; otherwise the file grows to its full size.
bluestore avl alloc bf free pct = 100
[client.rgw]
log file = $DIR/log/radosgw.log
pid file = $DIR/run/radosgw.pid
rgw data = $DIR/run
rgw frontends = beast endpoint=$address:$port
rgw enable apis = s3
# Free the space of deleted objects within seconds, not after two hours.
rgw gc obj min wait = 1
rgw gc processor period = 5
CONF

  mkdir -p "$DIR"/{mon,osd,run}
  conf=(-c "$DIR/ceph.conf")
  key=(ceph-authtool "$DIR/keyring" --gen-key)
  rm -f "$DIR/keyring"
  step "${key[@]}" -C -n mon. --cap mon 'allow *'
  step "${key[@]}" -n client.admin --cap mon 'allow *' --cap osd 'allow *'
  step "${key[@]}" -n osd.0 --cap mon 'allow profile osd' --cap osd 'allow *'
  step "${key[@]}" -n client.rgw --cap mon 'allow rw' --cap osd 'allow rwx'
  step monmaptool --create --clobber --fsid "$fsid" --addv a "v2:127.0.0.1:$mon" "$DIR/run/monmap"
  step ceph-mon "${conf[@]}" -i a --mkfs --monmap "$DIR/run/monmap"
  step ceph-mon "${conf[@]}" -i a
  # The monitor ignores an OSD that boots with another uuid than registered here.
  step ceph "${conf[@]}" osd new "$uuid" 0
  step ceph-osd "${conf[@]}" -i 0 --mkfs
  step ceph-osd "${conf[@]}" -i 0
  # This waits for the OSD. It must end before the gateway starts, because both
  # create the zone's pools.
  step radosgw-admin "${conf[@]}" -n client.rgw user create --uid=test --display-name=test \
    --access-key="${CEPH_S3_ACCESS_KEY:-test-access}" --secret-key="${CEPH_S3_SECRET_KEY:-test-secret}"
  step radosgw "${conf[@]}" -n client.rgw
  for ((n = 0; n < 300; n++)); do
    if answers "$address" "$port"; then trap - EXIT; echo "http://$address:$port"; return; fi
    # The daemon may not have written its pid yet.
    pid=$(cat "$DIR/run/radosgw.pid" 2>/dev/null) || true
    [[ -z $pid ]] || ours "$pid" || break
    sleep 0.1
  done
  die "radosgw does not answer; the end of its log: $(tail -n 5 "$DIR/log/radosgw.log")"
}

(($# >= 2)) || usage
DIR=$(realpath -m -- "$2")
case $1 in
  up) up "${3:-8000}" ;;
  down) down ;;
  *) usage ;;
esac
