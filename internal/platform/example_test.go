package platform_test

import (
	"context"
	"fmt"
	"time"

	"palimpsest/internal/platform"
)

// A program adds what it consists of in order of starting. The group ends when the program is told to stop, or
// when a member fails; it stops the last member first.
func ExampleGroup() {
	ctx, stop := context.WithCancelCause(context.Background()) // Main does this on a signal

	var group platform.Group
	group.Add("store", platform.StopFunc(func(context.Context) error {
		fmt.Println("store closed")
		return nil
	}))
	group.Add("worker", platform.NewRunner(func(ctx context.Context, ready func()) error {
		fmt.Println("worker runs")
		ready()
		stop(platform.ErrStopping)
		<-ctx.Done()
		fmt.Println("worker flushes:", platform.Stopping(ctx))
		return ctx.Err()
	}))
	fmt.Println("error:", group.Run(ctx, 10*time.Second))
	// Output:
	// worker runs
	// worker flushes: true
	// store closed
	// error: <nil>
}
