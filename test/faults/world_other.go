//go:build !linux

package main

import "errors"

var errLinux = errors.New("on Linux alone")

func isolate([]string) (int, bool) { return 0, false }
func alone() bool                  { return false }

type network struct{}

func newNetwork() (*network, error)         { return nil, errLinux }
func (*network) add(string) (string, error) { return "", errLinux }
func (*network) within(string) []string     { return nil }
func (*network) cut(string) error           { return errLinux }
func (*network) join(string) error          { return errLinux }
func (*network) narrow(string) error        { return errLinux }
func (*network) widen(string) error         { return errLinux }
func (*network) reset(string) error         { return errLinux }

type disk struct {
	dir    string
	before int64
}

func (*disk) written() int64 { return 0 }

const diskMiB = 0

func (*disk) check() error { return errLinux }

func tools(...string) error { return errLinux }

func newDisk(string, string) (*disk, error) { return nil, errLinux }
func (*disk) slow(int) error                { return errLinux }
func (*disk) quick() error                  { return errLinux }
func (*disk) close() error                  { return errLinux }
func (*disk) fill() error                   { return errLinux }
func (*disk) free() error                   { return errLinux }
