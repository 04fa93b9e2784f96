#!/usr/bin/env bash
# Run the protocol tests on Ceph's RADOS gateway, with one monitor and one OSD that keeps its objects in memory.
#
#   apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common      # Debian 12: Ceph 16.2
#   scripts/protocol_on_radosgw.sh [pytest arguments]
#
# Everything lives in a temporary folder on loopback ports and is stopped at the end. Recorded output:
# benchmarks/results/radosgw.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
dir=$(mktemp -d /tmp/teachercache-ceph-XXXXXX)
export CEPH_CONF=$dir/ceph.conf
pids=()
stop() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait || true
    rm -rf "$dir"
}
trap stop EXIT
free_port() { "$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
mon_port=$(free_port) rgw_port=$(free_port)
fsid=$("$python" -c 'import uuid; print(uuid.uuid4())')
key=testkeyid0000000 secret=testsecret000000000000000000000   # as in tests/servers.py

mkdir -p "$dir"/{mon,osd,rgw,log,run}
cat > "$CEPH_CONF" <<CONF
[global]
fsid = $fsid
mon_host = v1:127.0.0.1:$mon_port
public_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_data = $dir/mon
osd_data = $dir/osd
rgw_data = $dir/rgw
run_dir = $dir/run
pid_file = $dir/run/\$name.pid
admin_socket = $dir/run/\$name.asok
log_file = $dir/log/\$name.log
CONF

monmaptool --create --fsid "$fsid" --addv a "[v1:127.0.0.1:$mon_port]" "$dir/monmap" > /dev/null
ceph-mon --mkfs -i a --monmap "$dir/monmap"
ceph-mon -i a -f > "$dir/log/mon.out" 2>&1 & pids+=($!)
timeout 60 ceph osd create > /dev/null
ceph-osd -i 0 --mkfs --osd-uuid "$("$python" -c 'import uuid; print(uuid.uuid4())')" > "$dir/log/mkfs.out" 2>&1
timeout 30 ceph osd crush add osd.0 1.0 root=default host=localhost 2> /dev/null
ceph-osd -i 0 -f > "$dir/log/osd.out" 2>&1 & pids+=($!)
for _ in $(seq 60); do timeout 10 ceph osd stat 2> /dev/null | grep -q "1 up" && break; sleep 1; done
radosgw -n client.rgw -f --rgw-frontends="beast endpoint=127.0.0.1:$rgw_port" > "$dir/log/rgw.out" 2>&1 & pids+=($!)
timeout 120 radosgw-admin user create --uid=test --display-name=test --access-key=$key --secret-key=$secret > /dev/null
for _ in $(seq 60); do curl -s -o /dev/null "http://127.0.0.1:$rgw_port/" && break; sleep 1; done
radosgw --version
TEACHERCACHE_TEST_S3="http://127.0.0.1:$rgw_port" "$python" -m pytest -v --timeout=200 -k external "$@" \
    tests/teachercache/test_{store,cache,attempt,writer,publish,ledger,reuse,races,gc,optimize}.py
