package main

import (
	"io"
	"net"
	"reflect"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestASeedGivesOneScheduleWithinItsTime(t *testing.T) {
	t.Parallel()
	kinds := map[string]int{}
	for seed := range uint64(20) {
		plan := newSchedule(seed, time.Minute)
		if !reflect.DeepEqual(plan, newSchedule(seed, time.Minute)) {
			t.Errorf("seed %d: two schedules", seed)
		}
		for _, f := range plan {
			kinds[f.kind]++
			if f.after+f.hold > time.Minute {
				t.Errorf("seed %d: %s ends behind the load", seed, f)
			}
		}
	}
	if len(kinds) != 12 || reflect.DeepEqual(newSchedule(1, time.Minute), newSchedule(2, time.Minute)) {
		t.Errorf("kinds in 20 seeds: %v", kinds)
	}
}

func TestTheModelTakesWhatCanHaveBeenAndNothingElse(t *testing.T) {
	t.Parallel()
	at := func(call, end int64, s step) porcupine.Operation {
		return porcupine.Operation{Call: call, Return: end, Output: s}
	}
	for name, c := range map[string]struct {
		history []porcupine.Operation
		want    bool
	}{
		"one behind the other":                   {[]porcupine.Operation{at(0, 1, step{first: 0, events: 2}), at(2, 3, step{first: 2, events: 1})}, true},
		"at once, in the other order":            {[]porcupine.Operation{at(0, 9, step{first: 2, events: 2}), at(1, 8, step{first: 0, events: 2})}, true},
		"one acknowledged, then lost":            {[]porcupine.Operation{at(0, 1, step{first: 0, events: 2}), at(2, 3, step{first: 0, events: 1})}, false},
		"the later call before the earlier":      {[]porcupine.Operation{at(0, 1, step{first: 1, events: 1}), at(2, 3, step{first: 0, events: 1})}, false},
		"a conflict where none was":              {[]porcupine.Operation{at(0, 1, step{first: 0, events: 2}), at(2, 3, step{conflict: true, expected: 2, actual: 1})}, false},
		"a conflict that tells of what is not":   {[]porcupine.Operation{at(0, 1, step{first: 0, events: 2}), at(2, 3, step{conflict: true, expected: 1, actual: 5})}, false},
		"a conflict with somebody at the time":   {[]porcupine.Operation{at(0, 5, step{first: 0, events: 2}), at(2, 3, step{conflict: true, expected: 0, actual: 2})}, true},
		"a conflict before anybody has appended": {[]porcupine.Operation{at(2, 3, step{conflict: true, expected: 0, actual: 2}), at(4, 5, step{first: 0, events: 2})}, false},
	} {
		if got := porcupine.CheckOperations(register(0), c.history); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestALinkHoldsBackWhatIsSentWhileItIsCut(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	l, err := newLink(ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	near, err := net.Dial("tcp", l.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	far, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	send := func(text string) {
		if _, err := io.WriteString(near, text); err != nil {
			t.Fatal(err)
		}
	}
	receive := func(limit time.Duration) (string, error) {
		b := make([]byte, 16)
		if err := far.SetReadDeadline(time.Now().Add(limit)); err != nil {
			t.Fatal(err)
		}
		n, err := far.Read(b)
		return string(b[:n]), err
	}
	send("one")
	if got, err := receive(10 * time.Second); got != "one" {
		t.Errorf("got %q, %v", got, err)
	}
	l.cut()
	send("two")
	if got, err := receive(100 * time.Millisecond); err == nil {
		t.Errorf("got %q over a link that is cut", got)
	}
	l.mend()
	if got, err := receive(10 * time.Second); got != "two" {
		t.Errorf("got %q, %v", got, err)
	}
	l.reset()
	if _, err := receive(10 * time.Second); err == nil {
		t.Error("the connection goes on after a reset")
	}
}
