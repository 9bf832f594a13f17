// Command bench runs a Sarama consumer group and prints as one line of JSON what it received.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"log"
	"os"
	"strings"
	"time"

	"github.com/IBM/sarama"
)

const poll = 100 * time.Millisecond

// Result is what is printed.
type Result struct {
	Seconds    float64 `json:"seconds"`
	Received   int     `json:"received"`
	Distinct   int     `json:"distinct"`
	Duplicates int     `json:"duplicates"`
	// Offsets that were passed over and never received.
	Skipped int `json:"skipped"`
	// Sessions begun, all members together, and group generations seen.
	Sessions    int            `json:"sessions"`
	Generations int            `json:"generations"`
	SessionEnds map[string]int `json:"session_ends"`
	Errors      map[string]int `json:"errors"`
	Heartbeats  int            `json:"heartbeats"`
	// Longest time from a heartbeat to its answer, and between two heartbeats of one session.
	HeartbeatWaitMaxS float64 `json:"heartbeat_wait_max_s"`
	HeartbeatGapMaxS  float64 `json:"heartbeat_gap_max_s"`
	// Fetch requests by version.
	FetchVersions map[string]int `json:"fetch_versions"`
	Fetches       []Fetch        `json:"fetches"`
}

func main() {
	brokers := flag.String("brokers", "", "HOST:PORT, separated by commas")
	topic := flag.String("topic", "", "topic to read from its beginning")
	id := flag.String("group", "", "group id")
	clientID := flag.String("client-id", "", "client id of all members")
	members := flag.Int("members", 3, "members of the group")
	fetchBytes := flag.Int("fetch-bytes", 1<<20, "most bytes of a partition in one response")
	records := flag.Int("records", 0, "stop when so many records were received at least once")
	duration := flag.Duration("duration", time.Minute, "stop after this time")
	flag.Parse()
	sarama.Logger = log.New(os.Stderr, "", log.Ltime|log.Lmicroseconds)

	started := time.Now()
	group := &Group{
		brokers:    strings.Split(*brokers, ","),
		topic:      *topic,
		id:         *id,
		clientID:   *clientID,
		fetchBytes: int32(*fetchBytes),
		tally:      newTally(),
		wire:       newWire(started),
	}
	ctx, cancel := context.WithTimeout(context.Background(), *duration)
	defer cancel()
	for range *members {
		go group.consume(ctx)
	}
	for ctx.Err() == nil && (*records == 0 || group.distinct() < *records) {
		time.Sleep(poll)
	}
	// The members are not closed first: leaving a group may take as long as a hold.
	if err := json.NewEncoder(os.Stdout).Encode(group.result(time.Since(started))); err != nil {
		log.Fatal(err)
	}
}

func (g *Group) distinct() int {
	g.tally.lock.Lock()
	defer g.tally.lock.Unlock()
	return len(g.tally.seen)
}

func (g *Group) result(took time.Duration) Result {
	tally, wire := g.tally, g.wire
	tally.lock.Lock()
	defer tally.lock.Unlock()
	wire.lock.Lock()
	defer wire.lock.Unlock()
	return Result{
		Seconds:           took.Seconds(),
		Received:          tally.received,
		Distinct:          len(tally.seen),
		Duplicates:        tally.received - len(tally.seen),
		Skipped:           tally.skipped(),
		Sessions:          tally.sessions,
		Generations:       len(tally.generations),
		SessionEnds:       tally.ends,
		Errors:            tally.errors,
		Heartbeats:        wire.heartbeats,
		HeartbeatWaitMaxS: wire.heartbeatWaitMax.Seconds(),
		HeartbeatGapMaxS:  wire.heartbeatGapMax.Seconds(),
		FetchVersions:     wire.versions,
		Fetches:           wire.fetches,
	}
}
