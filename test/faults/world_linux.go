package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"palimpsest/test/e2e/harness"
)

// inside marks the process that runs in namespaces of its own.
const inside = "FAULTS_NAMESPACES"

// isolate runs this program again in network and mount namespaces of its own and returns its exit
// code; false when the kernel does not let us. Networks, mounts and loop devices made there go with it.
func isolate(args []string) (int, bool) {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS}
	if err := harness.StartCommand(cmd); err != nil {
		return 0, false
	}
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		for sig := range told {
			_ = cmd.Process.Signal(sig) // it may have ended
		}
	}()
	_ = cmd.Wait() // how it ended is in ProcessState
	return cmd.ProcessState.ExitCode(), true
}

// alone says whether this process is in namespaces of its own.
func alone() bool { return os.Getenv(inside) == "1" }

// network is a bridge, and for each process a network namespace behind a pair of interfaces.
type network struct{ hosts map[string]string }

// newNetwork makes the bridge.
func newNetwork() (*network, error) {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("private mounts: %w", err)
	}
	if err := os.MkdirAll("/run/netns", 0o755); err != nil {
		return nil, err
	}
	if err := syscall.Mount("tmpfs", "/run/netns", "tmpfs", 0, ""); err != nil { // names that nobody else sees
		return nil, err
	}
	return &network{hosts: map[string]string{}}, tools(
		"ip link set lo up",
		"ip link add faults type bridge",
		"ip addr add 10.77.0.1/24 dev faults",
		"ip link set faults up",
	)
}

// add makes the namespace of a process and returns its address.
func (n *network) add(name string) (string, error) {
	host := fmt.Sprintf("10.77.0.%d", 10+len(n.hosts))
	n.hosts[name] = host
	return host, tools(
		"ip netns add "+name,
		fmt.Sprintf("ip link add %s type veth peer name eth0 netns %s", name, name),
		fmt.Sprintf("ip link set %s master faults up", name),
		fmt.Sprintf("ip netns exec %s ip link set lo up", name),
		fmt.Sprintf("ip netns exec %s ip addr add %s/24 dev eth0", name, host),
		fmt.Sprintf("ip netns exec %s ip link set eth0 up", name),
	)
}

// within is the command that runs a program in the namespace of a process, under the same process id.
func (n *network) within(name string) []string { return []string{"ip", "netns", "exec", name} }

func (n *network) cut(name string) error  { return tools("ip link set " + name + " down") }
func (n *network) join(name string) error { return tools("ip link set " + name + " up") }

// narrow lets half a megabit a second pass, each way, and drops what waits for longer than 400 ms.
func (n *network) narrow(name string) error {
	const queue = " root tbf rate 512kbit burst 16kb latency 400ms"
	return tools("tc qdisc add dev "+name+queue, fmt.Sprintf("ip netns exec %s tc qdisc add dev eth0%s", name, queue))
}

func (n *network) widen(name string) error {
	return tools("tc qdisc del dev "+name+" root", fmt.Sprintf("ip netns exec %s tc qdisc del dev eth0 root", name))
}

// reset ends all connections of a process.
func (n *network) reset(name string) error {
	return tools(fmt.Sprintf("ip netns exec %s ss -K -t -H state established", name))
}

// tools runs commands, words with spaces between them.
func tools(lines ...string) error {
	for _, line := range lines {
		words := strings.Fields(line)
		if out, err := exec.CommandContext(context.Background(), words[0], words[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", line, err, strings.TrimSpace(string(out)))
		}
	}
	return nil
}

// disk is a file system on a loop device, for the store of one server.
type disk struct {
	dir, group, device string
	before             int64 // writes before it was slow
}

// Sizes of a disk and what it does a second when it is slow.
const (
	diskMiB    = 192
	slowWrites = 25
	slowBytes  = 128 << 10
)

// newDisk gives a directory a disk of its own.
func newDisk(dir, image string) (*disk, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		return nil, err
	}
	if err := os.Truncate(image, diskMiB<<20); err != nil {
		return nil, err
	}
	if err := tools("mkfs.ext4 -q -m 0 -F "+image, "mount -o loop "+image+" "+dir); err != nil {
		return nil, err
	}
	var st syscall.Stat_t
	if err := syscall.Stat(dir, &st); err != nil {
		return nil, err
	}
	return &disk{dir: dir, device: fmt.Sprintf("%d:%d", st.Dev>>8&0xfff, st.Dev&0xff),
		group: filepath.Join("/sys/fs/cgroup/blkio", fmt.Sprintf("faults-%d-%s", os.Getpid(), filepath.Base(dir)))}, nil
}

// slow lets a process that writes to the disk write little a second.
func (d *disk) slow(pid int) error {
	d.before = d.written()
	return errors.Join(d.limit(slowWrites, slowBytes), os.WriteFile(filepath.Join(d.group, "cgroup.procs"), fmt.Append(nil, pid), 0o644))
}

// check says why the disk cannot be slowed: that takes the blkio controller of cgroup v1.
func (d *disk) check() error {
	if err := os.Mkdir(d.group, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return d.quick()
}

func (d *disk) quick() error { return d.limit(0, 0) }

func (d *disk) limit(writes, bytes int) error {
	return errors.Join(
		os.WriteFile(filepath.Join(d.group, "blkio.throttle.write_iops_device"), fmt.Appendf(nil, "%s %d", d.device, writes), 0o644),
		os.WriteFile(filepath.Join(d.group, "blkio.throttle.write_bps_device"), fmt.Appendf(nil, "%s %d", d.device, bytes), 0o644))
}

// written is how many writes there were while the disk was slow.
func (d *disk) written() (n int64) {
	b, err := os.ReadFile(filepath.Join(d.group, "blkio.throttle.io_serviced"))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == d.device && f[1] == "Write" {
			n, _ = strconv.ParseInt(f[2], 10, 64) // the kernel writes numbers
		}
	}
	return n
}

// close unmounts the disk. The process that was slowed has ended.
func (d *disk) close() error {
	_ = os.Remove(d.group) // not while somebody is in it, and then it is of no harm
	return syscall.Unmount(d.dir, syscall.MNT_DETACH)
}

const filler = "filler"

// fill leaves no byte free.
func (d *disk) fill() error {
	f, err := os.Create(filepath.Join(d.dir, filler))
	if err != nil {
		return err
	}
	defer f.Close()
	for size := 1 << 20; size > 0; size /= 4 {
		b := make([]byte, size)
		for err = nil; err == nil; {
			_, err = f.Write(b)
		}
		if !errors.Is(err, syscall.ENOSPC) {
			return err
		}
	}
	return nil
}

func (d *disk) free() error { return os.Remove(filepath.Join(d.dir, filler)) }
